"""The wheel is complete: installed into an empty environment it runs a scenario by name, from any folder."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_wheel_runs_a_scenario_by_name(tmp_path):
    """The environment holds nothing but the wheel; its dependencies are read from this one, to stay offline."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("infersim-*.whl")
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

    def output_of(*command: str | Path) -> str:
        options = {"check": True, "cwd": tmp_path, "env": clean, "capture_output": True, "text": True, "timeout": 300}
        return subprocess.run([python, *command], **options).stdout

    site = output_of("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel], check=True
    )
    dependencies = Path(site, "dependencies.pth")  # comes after the wheel; .pth files in there are not read
    dependencies.write_text(sysconfig.get_path("purelib") + "\n")
    where = output_of("-c", "import infersim; print(infersim.__file__)")
    assert Path(where.strip()).is_relative_to(environment)
    result = json.loads(
        output_of("-m", "infersim", "run", "llama-8b-h100", "--set", "workload.num_requests=50", "--json")
    )
    assert result["counts"]["completed"] == 50
    folders = {"hardware": "hardware_profiles", "scenarios": "scenarios", "workloads": "workloads"}
    for verb, folder in folders.items():
        listed = output_of("-m", "infersim", "show", verb)
        for path in (ROOT / folder).glob("*.yaml"):
            assert path.stem in listed
