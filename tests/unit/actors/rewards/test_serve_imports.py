"""The container of rubato serve-rewards installs no more than that imports."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
SHOW = "import sys, rubato.actors.rewards.serve; print(*{name.partition('.')[0] for name in sys.modules})"


def test_what_the_server_imports_is_what_the_container_installs():
    text = (ROOT / "configs/deploy/rewards.Dockerfile").read_text()
    installed = set(re.findall(r'"([a-z]+)>=', text))

    done = subprocess.run([sys.executable, "-c", SHOW], check=True, capture_output=True, text=True, cwd=ROOT)

    imported = {"pyyaml" if name == "yaml" else name for name in done.stdout.split()}
    heavy = {"torch", "transformers", "numpy", "redis", "zmq", "structlog", "gymnasium", "matplotlib", "safetensors"}
    assert imported & heavy == set()
    assert installed <= imported
    assert installed == {"httpx", "msgspec", "pydantic", "pyyaml", "starlette", "uvicorn"}
