"""The drafters that come along: whole, small, telling nothing of the machine they were made on, and worth something."""

import re

import pytest

from specwave.artifacts import assets_dir
from specwave.benchmark.drafters import builtin_drafter
from specwave.decoding import generate
from specwave.eagle import load_drafter
from specwave.eagle.export import read_drafter
from specwave.target import load_target

FOLDERS = sorted(path.parent for path in assets_dir().glob("*/card.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_drafter_is_whole_and_small(folder):
    _, tensors, card = read_drafter(folder)
    assert card["training"]["validation"]["tau_hat"] > 1
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 16e6
    assert {str(tensor.dtype) for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {"torch.bfloat16"}
    for file in ("card.json", "config.json", "README.md"):
        assert not re.search(r"""["'( ]/\w+/""", (folder / file).read_text(encoding="utf-8")), file  # an absolute path


def test_the_default_model_s_own_drafter_drafts_its_text():
    target = load_target("smollm2_135m", dtype="float32")
    folder = builtin_drafter(target.fingerprint)
    assert folder is not None
    ids = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Write three short sentences about the sea."}],
        add_generation_prompt=True,
        return_dict=False,
    )
    plain = generate(target, None, ids, max_new_tokens=48)
    drafted = generate(target, load_drafter(folder, target, levels=2), ids, max_new_tokens=48)
    assert drafted.tokens == plain.tokens
    assert len(drafted.tokens) / len(drafted.accept_lengths) > 1.2  # 1.76 foretold on held-out text
