"""For processes of our own: structlog without rich, which it loads for a console that they do not have. 0.2 s of CPU in each."""

import sys
from importlib import import_module


def import_structlog() -> None:
    """Import it so, once, before anything else does. An embedding program keeps its structlog as it is: it never calls this."""
    if "rich" in sys.modules or "structlog" in sys.modules:
        return
    sys.modules["rich"] = None  # pyright: ignore[reportArgumentType]  - what structlog takes for "not installed"
    try:
        import_module("structlog")
    finally:
        del sys.modules["rich"]
