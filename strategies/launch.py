LAUNCHED = "PACELINE_LAUNCHED"


def rerun(*a, **k):
    raise NotImplementedError


def start(*a, **k):
    raise NotImplementedError


def register_failure_hook(): ...
