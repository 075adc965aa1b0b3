"""vLLM's process: python -m specheads.models.export_checks.in_vllm FOLDER BASE METHOD DEPTH DTYPE OUT.

Loads the draft head in FOLDER into vLLM, and writes its tensors as vLLM holds them to the file OUT. Of BASE only the
config is used.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from specheads.models.export_checks.comparison import positions_below


def main(folder: str, base: str, method: str, depth: str, dtype: str, out: str) -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model

    speculative = {"method": method, "model": folder, "num_speculative_tokens": int(depth)}
    args = EngineArgs(model=base, dtype=dtype, enforce_eager=True, speculative_config=speculative)
    config = args.create_engine_config()
    draft = config.speculative_config.draft_model_config
    torch.set_default_dtype(draft.dtype)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{out}.rendezvous", 0, "gloo")
        initialize_model_parallel(1)
        model = initialize_model(vllm_config=config, model_config=draft)
        # Not get_model, which may repack matrices for a device, so that their values cannot be compared.
        get_model_loader(config.load_config).load_weights(model, draft)
    rotary = next((m for m in model.modules() if hasattr(m, "cos_sin_cache")), None)
    found: dict[str, Any] = {
        "version": vllm.__version__, "class": type(model).__name__, "cos": None, "positions": None, "sin": None,
        "layers": getattr(draft.hf_config, "eagle_aux_hidden_state_layer_ids", None),
        "tensors": {name: t.detach().cpu().clone() for name, t in model.state_dict().items()},
    }  # fmt: skip
    if rotary is not None:
        cache = rotary.cos_sin_cache.detach().cpu()
        found["positions"] = positions_below(len(cache))
        found["cos"], found["sin"] = (t.clone() for t in cache[found["positions"]].chunk(2, -1))
    torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
