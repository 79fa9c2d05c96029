"""Places behind addresses for tests: ``from remote_places import s3_server, Disk``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Disk(LocalFileSystem):
    """Local files behind ``disk://``: folders are real there, and a file is visible while it is written."""

    protocol = "disk"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return super()._strip_protocol(str(path).removeprefix("disk://"))


fsspec.register_implementation("disk", Disk, clobber=True)


@contextmanager
def s3_server() -> Iterator[str]:
    """A real S3 server on this machine; gives its address."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()
