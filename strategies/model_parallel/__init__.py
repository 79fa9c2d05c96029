"""Split one model across processes: tensor, pipeline and context parallelism."""
