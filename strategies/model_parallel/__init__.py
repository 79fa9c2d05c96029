"""One model split over processes: tensor, pipeline and context parallelism."""
