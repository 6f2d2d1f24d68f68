"""What processes of a server load, and what they do without: it costs each of them time and memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("numpy", "transformers", "gguf", "mlx", "mlx_lm", "ray", "torch")
ALL_MODELS = """from tandem.loading.mlx_lm_models import import_models_only
import_models_only()
import tandem.executors.assembly, importlib
from tandem.models.families.table import FAMILIES, module_of
for family in FAMILIES:
    if FAMILIES[family].source == "mlx_lm":
        importlib.import_module(f"mlx_lm.models.{module_of(family)}")
"""
OF_MLX_VLM = """from tandem.loading.mlx_lm_models import import_models_only
import_models_only()
from tandem.loading.build_model import build_model
import importlib.util
from tandem.models.families.tiny import TINY, tiny_config
from tandem.models.families.table import family_of
for family in TINY:
    if family_of(family).source == "mlx_vlm" and importlib.util.find_spec("mlx_vlm"):
        build_model(tiny_config(family))
"""
HELP = """from tandem.cli.main import main
try:
    main(["--help"])
except SystemExit:
    pass
"""
PROGRAMS = {  # what parity computes with comes after the BLAS has been told how
    "supervisor": ("import tandem.cli.serve", (*HEAVY, "fastapi", "uvicorn")),
    "api": ("import tandem.cli.processes, tandem.server.api_process", HEAVY),
    "engine": ("import tandem.cli.processes, tandem.engine.engine_process", HEAVY),
    "rank": ("import tandem.executors.worker", HEAVY),
    "rank with all models": (ALL_MODELS, ("transformers", "mlx_lm.utils", "torch")),
    "rank with models of mlx-vlm": (OF_MLX_VLM, ("transformers", "requests", "scipy", "cv2", "datasets", "mlx_audio", "torch")),
    "parity": ("import tandem.cli.parity", ("fastapi", "uvicorn", "mlx.core", "transformers")),
    "planner": ("import tandem.supervision.engines, tandem.planner.plan", ("mlx", "mlx_lm")),
    "texts": ("import tandem.text.stream", ("mlx", "transformers", "torch")),
    "help": (HELP, ("rich", "prompt_toolkit", "numpy", "transformers", "zmq", "http.client")),
}


@pytest.mark.parametrize(("program", "without"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_process_starts_without_what_it_may_not_need(program: str, without: tuple[str, ...]) -> None:
    code = f"{program}\nimport sys; print('loaded:', *(set(sys.modules) & set({without})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("loaded:", "")
