"""The Python client of a BatonMQ or RocketMQ cluster.

`Producer`, `PushConsumer`, `PullConsumer` and `Admin` are asyncio classes; `batonmq.blocking` wraps
them for scripts. `batonmq.public` has the one list of public names. It is loaded when the first of
them is used, so that importing the package costs next to nothing (`mqctl --help` is fast).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batonmq.public import *  # noqa: F403
else:

    def __getattr__(name):
        import importlib

        if name != "__all__" and name.startswith("_"):
            raise AttributeError(f"module 'batonmq' has no attribute {name!r}")
        names = vars(importlib.import_module("batonmq.public"))
        public = {each: value for each, value in names.items() if not each.startswith("_")}
        globals().update(public, __all__=sorted(public))
        try:
            return globals()[name]
        except KeyError:
            raise AttributeError(f"module 'batonmq' has no attribute {name!r}") from None

    def __dir__():
        return list(__getattr__("__all__"))
