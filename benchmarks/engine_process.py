"""An engine in a process of its own: its threads and its OpenMP are in nobody's way."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class EngineProcess:
    """Makes an object in a new process; its methods are this one's, and run there.

    Parameters
    ----------
    factory : callable
        Of a module that can be imported; what it returns stays in the process.
    **options
        Its arguments.

    Raises
    ------
    Exception
        Whatever the factory raised.
    """

    def __init__(self, factory: Callable[..., Any], **options: Any) -> None:
        # Not forked: OpenMP's threads would be lost.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, factory, options), name=factory.__name__, daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            self._result()
        except BaseException:
            self.close()
            raise

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return functools.partial(self._call, method)

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _call(self, method: str, *args: Any) -> Any:
        """What the method returns; what it raises is raised here."""
        self._pipe.send((method, args))
        return self._result()

    def _result(self) -> Any:
        try:
            value = self._pipe.recv()
        except EOFError:
            self._process.join(10)
            raise RuntimeError(
                f"{self._process.name}: the process ended, status {self._process.exitcode}"
            ) from None
        if isinstance(value, BaseException):
            raise value
        return value


def _serve(pipe: Connection, factory: Callable[..., Any], options: dict[str, Any]) -> None:
    try:
        engine = factory(**options)
        pipe.send(None)
        while True:
            method, args = pipe.recv()
            pipe.send(getattr(engine, method)(*args))
    except EOFError:  # the other end is closed
        return
    except Exception as error:
        pipe.send(error)
