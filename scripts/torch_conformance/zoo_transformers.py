"""Models of the zoo that transformers has, of one or two narrow layers, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from scripts.torch_conformance.zoo_torch import Batch, Case

_WORDS = 48
_LENGTH = 8

Model = Callable[[], torch.nn.Module]


def _train(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = model(**inputs).loss
    loss.backward()
    return loss


def _text(**more: Any) -> Batch:
    def make(generator: torch.Generator) -> dict[str, Any]:
        words = torch.randint(3, _WORDS, (2, _LENGTH), generator=generator)
        return {"input_ids": words, "labels": words, **more}

    return make


def _pictures(generator: torch.Generator) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(2, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 2, (2,), generator=generator),
    }


def _pairs(generator: torch.Generator) -> dict[str, Any]:
    return {
        "input_ids": torch.randint(3, _WORDS, (2, _LENGTH), generator=generator),
        "pixel_values": torch.randn(2, 3, 32, 32, generator=generator),
        "return_loss": True,
    }


def _make(model: str, config: str, **settings: Any) -> Model:
    def make() -> torch.nn.Module:
        import transformers  # imported by those who have it only

        made = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made.train()

    return make


_GPT = {"vocab_size": _WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_BERT = {**_GPT, "intermediate_size": 32, "max_position_embeddings": 32}
_LLAMA = {**_BERT, "num_key_value_heads": 1}
_SMALL = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2}
_BART = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "vocab_size": _WORDS,
    "max_position_embeddings": 32,
}
_EYE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 32}
_UNUSED = {"find_unused_parameters": True}


def _case(make: Model, batch: Batch, **settings: Any) -> Case:
    return Case(make=make, batch=batch, train=_train, settings=settings)


CASES: dict[str, Case] = {
    name: _case(make, batch, **settings)
    for name, make, batch, settings in (
        (
            "GPT-2",
            _make("GPT2LMHeadModel", "GPT2Config", vocab_size=_WORDS, n_embd=16, n_layer=2, n_head=2),
            _text(),
            {},
        ),
        ("GPT-NeoX", _make("GPTNeoXForCausalLM", "GPTNeoXConfig", **_BERT), _text(), {}),
        ("OPT", _make("OPTForCausalLM", "OPTConfig", **_GPT, ffn_dim=32, word_embed_proj_dim=16), _text(), {}),
        (
            "BLOOM",
            _make("BloomForCausalLM", "BloomConfig", vocab_size=_WORDS, hidden_size=16, n_layer=2, n_head=2),
            _text(),
            {},
        ),
        ("Falcon", _make("FalconForCausalLM", "FalconConfig", **_GPT), _text(), {}),
        ("Llama", _make("LlamaForCausalLM", "LlamaConfig", **_LLAMA), _text(), {}),
        ("Mistral", _make("MistralForCausalLM", "MistralConfig", **_LLAMA), _text(), {}),
        ("Qwen 2", _make("Qwen2ForCausalLM", "Qwen2Config", **_LLAMA), _text(), {}),
        ("Gemma", _make("GemmaForCausalLM", "GemmaConfig", **_LLAMA, head_dim=8), _text(), {}),
        ("Phi", _make("PhiForCausalLM", "PhiConfig", **_BERT), _text(), {}),
        ("Mixtral", _make("MixtralForCausalLM", "MixtralConfig", **_LLAMA, num_local_experts=3), _text(), _UNUSED),
        (
            "Mamba",
            _make("MambaForCausalLM", "MambaConfig", vocab_size=_WORDS, hidden_size=16, num_hidden_layers=1),
            _text(),
            {},
        ),
        ("BERT", _make("BertForMaskedLM", "BertConfig", **_BERT), _text(), {}),
        ("RoBERTa", _make("RobertaForMaskedLM", "RobertaConfig", **_BERT), _text(), {}),
        ("ALBERT", _make("AlbertForMaskedLM", "AlbertConfig", **_BERT, embedding_size=8), _text(), {}),
        ("ELECTRA", _make("ElectraForMaskedLM", "ElectraConfig", **_BERT, embedding_size=8), _text(), {}),
        (
            "DistilBERT",
            _make(
                "DistilBertForMaskedLM",
                "DistilBertConfig",
                vocab_size=_WORDS,
                dim=16,
                n_layers=1,
                n_heads=2,
                hidden_dim=32,
            ),
            _text(),
            {},
        ),
        ("DeBERTa 2", _make("DebertaV2ForMaskedLM", "DebertaV2Config", **_BERT), _text(), {}),
        ("FNet", _make("FNetForMaskedLM", "FNetConfig", **{**_BERT, "num_attention_heads": 2}), _text(), {}),
        (
            "XLNet",
            _make("XLNetLMHeadModel", "XLNetConfig", vocab_size=_WORDS, d_model=16, n_layer=1, n_head=2, d_inner=32),
            _text(),
            _UNUSED,
        ),
        (
            "BERT with a pooler that is not used",
            _make("BertForPreTraining", "BertConfig", **_BERT),
            _text(next_sentence_label=torch.zeros(2, dtype=torch.long)),
            {},
        ),
        (
            "T5",
            _make("T5ForConditionalGeneration", "T5Config", vocab_size=_WORDS, decoder_start_token_id=0, **_SMALL),
            _text(),
            {},
        ),
        ("BART", _make("BartForConditionalGeneration", "BartConfig", **_BART), _text(), {}),
        ("Pegasus", _make("PegasusForConditionalGeneration", "PegasusConfig", **_BART), _text(), {}),
        ("ViT", _make("ViTForImageClassification", "ViTConfig", **_EYE, patch_size=8), _pictures, {}),
        ("DeiT", _make("DeiTForImageClassification", "DeiTConfig", **_EYE, patch_size=8), _pictures, {}),
        (
            "Swin",
            _make(
                "SwinForImageClassification",
                "SwinConfig",
                image_size=32,
                embed_dim=8,
                depths=[1, 1],
                num_heads=[1, 2],
                window_size=4,
            ),
            _pictures,
            {},
        ),
        (
            "ConvNeXt",
            _make("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1]),
            _pictures,
            {},
        ),
        (
            "ResNet",
            _make(
                "ResNetForImageClassification",
                "ResNetConfig",
                embedding_size=8,
                hidden_sizes=[8, 8],
                depths=[1, 1],
                layer_type="basic",
            ),
            _pictures,
            {},
        ),
        (
            "CLIP",
            _make(
                "CLIPModel",
                "CLIPConfig",
                text_config={**_BERT, "eos_token_id": 2},
                vision_config={**_EYE, "patch_size": 8},
                projection_dim=8,
            ),
            _pairs,
            {},
        ),
    )
}
