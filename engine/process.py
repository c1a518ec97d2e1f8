"""What the engines expect of the process that they run in, set once, before the first of them starts."""

from __future__ import annotations

import os
import warnings


def prepare_process() -> None:
    """Set environment variables; on a CPU also stop compilation and install a faster LoRA in vLLM.

    It changes the whole process. Scripts call it once, after the rank has its GPU.
    """
    import torch

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in process: starts ten times as fast, dies with us
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("TRITON_PRINT_AUTOTUNING", "0")  # a line a kernel through the progress bars
    # On Hopper flash-linear-attention prefers TileLang where it can compile, against CUDA headers that need not
    # fit. Triton's gradients, wrong there from 3.4 on, are right since 3.7.1; with those between it refuses.
    os.environ.setdefault("FLA_TILELANG", "0")
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    if not torch.cuda.is_available():
        from transformers import logging

        logging.set_verbosity_error()  # that there are faster kernels for GPUs
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        # Compiling what vLLM marks for it needs a C++ compiler and a path without blanks, and gains nothing.
        torch.compiler.set_stance("force_eager")
        from vllm.platforms import current_platform

        one_adapter = "engine.cpu_lora.OneAdapterPunica"
        type(current_platform).get_punica_wrapper = classmethod(lambda cls: one_adapter)  # pyright: ignore[reportAttributeAccessIssue]
