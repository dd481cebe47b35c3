"""Run as a script by test_preflight.py: trains two steps and prints the memory it took, and what was forecast.

    python peak.py <folder> <JSON of a shape>

Resident memory above what there is before the target is loaded; a short training before that loads the libraries.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specwave.app.preflight import LIBRARIES, architecture, forecast
from specwave.app.run import Run, peak_memory
from specwave.app.train import TrainConfig, main
from specwave.app.trainer import TrainerConfig
from specwave.data import Sample
from specwave.data.samples import Prepared, prepare
from specwave.eagle.options import Eagle3
from specwave.skipping.options import Kangaroo
from specwave.target import ModelConfig
from specwave.target.tiny import make_tiny


@dataclass
class Rows:
    """Conversations of one length, all answer but for a token."""

    batch_size: int
    max_length: int
    vocabulary: int

    def prepared(self, target: Any) -> Prepared:
        draw = torch.Generator().manual_seed(0)
        samples = []
        for place in range(2 * self.batch_size + 1):
            ids = torch.randint(3, self.vocabulary, (self.max_length,), generator=draw).tolist()
            samples.append(Sample(ids, [False] + [True] * (len(ids) - 1), f"s{place}"))
        return prepare(samples, self.max_length, 1, lambda ids: "")


def no_logger(save_dir: str) -> Any:
    import pytorch_lightning as pl

    return pl.loggers.CSVLogger(save_dir, name="", version="", flush_logs_every_n_steps=1)


def a_config(model: Path, shape: dict[str, int]) -> TrainConfig:
    adapter = shape["groups"] == 0
    groups = None if adapter else [[1, 3, 5], [5], [0, 2]][: shape["groups"]]
    eagle = Eagle3(steps=shape["steps"], draft_vocab_size=shape["draft"], init="random")
    return TrainConfig(
        model=ModelConfig("tiny", str(model), dtype="float32", device="cpu"),
        data=Rows(shape["rows"], shape["length"], shape["vocabulary"]),
        drafter=Kangaroo(exit=2) if adapter else eagle,
        trainer=TrainerConfig(max_steps=2, save_every=9, validate_every=9, decode=0, precision="32-true"),
        logger=no_logger,
        groups=groups,
    )


def run() -> None:
    folder, shape = Path(sys.argv[1]), json.loads(sys.argv[2])
    width = shape["width"]
    sizes = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": 6,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 64,
        "head_dim": 32,
        "vocab_size": shape["vocabulary"],
    }
    small = shape | {"rows": 1, "length": 32, "groups": min(1, shape["groups"])}
    make_tiny(folder / "model", **sizes)
    main(a_config(folder / "model", small), Run(folder / "small"))
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak is what there is now
    before = peak_memory()["peak_memory_bytes"]
    config = a_config(folder / "model", shape)
    found = forecast(config, architecture(config.model))
    main(config, Run(folder / "run"))
    peak = peak_memory()["peak_memory_bytes"] - before
    print(json.dumps({"peak": peak, "forecast": found.memory - LIBRARIES["cpu"], "parts": found.parts}))


if __name__ == "__main__":
    run()
