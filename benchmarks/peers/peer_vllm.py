"""Worker: vLLM on the CPU, plain, with prompt lookup or with an EAGLE-3 drafter of ours; one of them a process.

One prompt at a time, eager (compiling gains nothing at this size and takes minutes), no prefix cache: the prompts come
again, and no peer is to remember them. With `counted` in the settings the method `counters` answers with what drafts
came to so far.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from wire import NGRAM, Decode, serve

SITE = Path(sys.prefix) / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, which then waits without work
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "KMP_BLOCKTIME": "5",  # milliseconds, as vLLM sets for its own processes
    "KMP_TPAUSE": "0",
}


def preload() -> None:
    """Starts anew with the allocator and OpenMP that vLLM's manual asks for; without them it warns of losses. The other
    peers keep torch's own OpenMP, whose threads wait otherwise: compare the cores used before the tokens a second."""
    found = [*(SITE / "vllm" / "libs").glob("libtcmalloc*.so*"), *Path(sys.prefix, "lib").glob("libiomp5.so")]
    if found and "LD_PRELOAD" not in os.environ:
        os.environ.update(ENVIRONMENT, LD_PRELOAD=":".join(map(str, found)))
        os.execv(sys.executable, [sys.executable, *sys.argv])


def load(settings: dict[str, Any]) -> Decode:
    from vllm import LLM, SamplingParams, TokensPrompt

    drafts = settings["drafts"]
    speculative = {
        "plain": None,
        "lookup": {
            "method": "ngram",
            "num_speculative_tokens": drafts,
            "prompt_lookup_max": NGRAM,
            "prompt_lookup_min": 1,
        },
        "eagle3": {"method": "eagle3", "num_speculative_tokens": drafts, "model": settings["checkpoint"]},
    }[settings["method"]]
    engine = LLM(
        settings["folder"],
        dtype=settings["dtype"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=1,
        disable_log_stats=not settings.get("counted", False),
        max_model_len=settings["room"] + 16,  # drafts may reach beyond the last token
        speculative_config=speculative,
    )

    def decode(method: str, drafts: int, ids: list[int], new_tokens: int) -> list[int]:
        if method == "counters":
            return counters(engine)
        sampling = SamplingParams(
            temperature=0, max_tokens=new_tokens, stop_token_ids=settings["eos"], detokenize=False
        )
        made = engine.generate(TokensPrompt(prompt_token_ids=ids), sampling, use_tqdm=False)
        return list(made[0].outputs[0].token_ids)

    return decode


def counters(engine: Any) -> list[int]:
    """[rounds with a draft, drafts, those accepted, those accepted at each position], of this process so far."""
    found = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in engine.get_metrics()}
    single = [found[name].value for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")]
    return [*single, *found["num_accepted_tokens_per_pos"].values]


if __name__ == "__main__":
    preload()
    serve(load, "torch", "transformers", "vllm-cpu")
