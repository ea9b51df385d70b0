"""The embedded checkpoint: its facts, its tokenizer, its bytes, and what it says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from chained_stages import ChainedStages
from hypothesis import given
from hypothesis import strategies as st

from engine.core.config import EngineConfig
from engine.core.errors import CheckpointError
from engine.core.limits import EMBEDDED_FACTS, EMBEDDED_WINDOW_FACTS, Limits, ModelFacts
from engine.core.plan import SamplingSpec
from engine.model import checkpoint, embedded
from engine.model.embedded import SPECIAL_TOKENS, embedded_folder, write_embedded

TOKENIZER = embedded._tokenizer()


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(embedded_folder(0))


@pytest.fixture(scope="module")
def chain() -> ChainedStages:
    config = EngineConfig(device="cpu", context_length=256)
    return ChainedStages(config, Limits.of(config, EMBEDDED_FACTS))


@pytest.mark.parametrize("promised", [EMBEDDED_FACTS, EMBEDDED_WINDOW_FACTS], ids=lambda facts: facts.name)
def test_facts_read_from_the_folder_equal_the_promised_ones(promised: ModelFacts) -> None:
    """B18: of the model with window layers too."""
    folder = str(embedded_folder(0, windowed=promised is EMBEDDED_WINDOW_FACTS))
    assert checkpoint.read_facts(EngineConfig(model=folder)) == msgspec.structs.replace(promised, name=folder)
    assert checkpoint.read_facts(EngineConfig(model=promised.name)) is promised


def test_the_model_with_windows_has_a_folder_of_its_own() -> None:
    """A window layer needs and keeps the last tokens alone (B18)."""
    folder = checkpoint.resolve_folder(EngineConfig(model="embedded-window:3"))
    assert folder == embedded_folder(3, windowed=True) != embedded_folder(3)


@pytest.mark.parametrize(("model", "seed"), [("embedded", 5), ("embedded:0", 0), ("embedded:7", 7)])
def test_a_name_may_carry_the_seed_of_the_weights(model: str, seed: int) -> None:
    assert checkpoint.resolve_folder(EngineConfig(model=model, seed=5)) == embedded_folder(seed)


@pytest.mark.parametrize("model", ["embedded:", "embedded:x", "embedded:-1", f"embedded:{2**63}", "embedded:1:2"])
def test_a_name_that_carries_no_seed_is_refused(model: str) -> None:
    with pytest.raises(CheckpointError, match=rf"'embedded:SEED', a folder or a hub name .* got '{model}'"):
        checkpoint.resolve_folder(EngineConfig(model=model))


def test_facts_of_the_embedded_model_need_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "embedded_folder", lambda *_, **__: pytest.fail("wrote the checkpoint"))
    assert checkpoint.read_facts(EngineConfig()) is EMBEDDED_FACTS


def test_another_dtype_changes_the_kv_size() -> None:
    facts = checkpoint.read_facts(EngineConfig(dtype="bfloat16"))
    assert facts.kv_bytes_per_token == EMBEDDED_FACTS.kv_bytes_per_token // 2


def test_equal_seeds_give_equal_bytes_and_others_do_not(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        write_embedded(tmp_path / name, seed)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    contents = {name: [(tmp_path / name / file).read_bytes() for file in files] for name in "abc"}
    assert contents["a"] == contents["b"]
    assert contents["a"] != contents["c"]


def test_many_at_once_make_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(embedded_folder, [5] * 8))
    assert len(folders) == 1
    assert list((tmp_path / "lockstep").iterdir()) == list(folders)


def test_an_unwritable_cache_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="XDG_CACHE_HOME"):
        embedded_folder(0)


@given(text=st.text(max_size=60))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=60))
def test_ids_of_plain_text_are_its_bytes(text: str) -> None:
    assert bytes(TOKENIZER.encode(text, add_special_tokens=False).ids) == text.encode()


def test_special_tokens_have_the_promised_ids(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(256, 264))
    assert (tokenizer.eos_token_id,) == EMBEDDED_FACTS.eos_token_ids
    assert len(tokenizer) == EMBEDDED_FACTS.vocab_size


def test_the_chat_template_marks_who_speaks(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """The chat template is the tokenizer's (C04)."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_greedy_output_varies_with_the_prompt_and_along_itself(chain: ChainedStages) -> None:
    outputs = []
    for row, prompt in enumerate((b"Hello", b"Hello!", b"a", b"The quick brown fox")):
        outputs.append(chain.generate(row, list(prompt), 40, chunk=64, spec=SamplingSpec(seed=0)))
    assert all(len(set(output)) >= 12 for output in outputs)
    assert len({tuple(output[-20:]) for output in outputs}) == len(outputs)


def test_random_output_is_printable_so_never_a_special_token(chain: ChainedStages) -> None:
    spec = SamplingSpec(seed=11, temperature=5.0)
    output = chain.generate(5, [1, 2, 3], 150, chunk=64, spec=spec)
    assert all(token == ord("\n") or ord(" ") <= token <= ord("~") for token in output)


def test_greedy_tokens_equal_those_of_generate(chain: ChainedStages) -> None:
    """C11: suppressed tokens included."""
    model = transformers.AutoModelForCausalLM.from_pretrained(embedded_folder(0))
    prompt = list(b"once upon a time")
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)
    output = chain.generate(6, prompt, 32, chunk=5, spec=SamplingSpec(seed=0))
    assert output == expected[0, len(prompt) :].tolist()


def test_interrupted_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_publish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            embedded_folder(3)
    assert list((tmp_path / "lockstep").iterdir()) == []
    assert (embedded_folder(3) / "model.safetensors").is_file()
