import subprocess
import sys


def test_an_actor_process_loads_structlog_without_rich_which_others_may_still_import():
    script = "import sys, rubato.runtime.node; assert 'structlog' in sys.modules and 'rich' not in sys.modules; import rich.text"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_program_that_has_rich_keeps_structlog_as_it_is():
    script = "import rich; from rubato.runtime.importer import import_structlog as f; f(); import structlog.dev as d; assert d.rich"
    subprocess.run([sys.executable, "-c", script], check=True)
