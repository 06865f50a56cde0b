"""The model architectures that the pinned llama.cpp knows, as data.

From llama-cpp-python 0.3.36, vendor/llama.cpp/src: LLM_ARCH_NAMES and the llm_arch_* tests of
llama-arch.cpp, create_memory of llama-model.cpp, and the sliding-window patterns of src/models. To be
renewed with the pin.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SUPPORTED = _names(
    """
    afmoe apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bailingmoe3 bert bitnet bloom
    chameleon chatglm codeshell cogvlm cohere2 cohere2moe command-r dbrx deci deepseek deepseek2
    deepseek2-ocr deepseek32 deepseek4 dflash dots1 dots3note dream eagle3 ernie4_5 ernie4_5-moe
    eurobert exaone exaone-moe exaone4 falcon falcon-h1 gemma gemma-embedding gemma2 gemma3 gemma3n
    gemma4 gemma4-assistant glm-dsa glm4 glm4moe glm5-next gpt-oss gpt2 gptj gptneox granite
    granite_swa granitehybrid granitemoe graniteswitch grok grovemoe hrm_text hunyuan-dense
    hunyuan-moe hunyuan_vl hy_v3 hy_v4 internlm2 jais jais2 jamba jina-bert-v2 jina-bert-v3 kimi-k3
    kimi-linear laguna lfm2 lfm2moe llada llada-moe llama llama-embed llama4 maincoder mamba mamba2
    maple mellum mimo2 minicpm minicpm3 minimax-01 minimax-m2 minimax-m3 mistral3 mistral4
    modern-bert mpt muse-glimmer nanbeige nemotron nemotron_h nemotron_h_moe neo-bert nomic-bert
    nomic-bert-moe olmo olmo2 olmoe openelm orion paddleocr pangu-embedded phi2 phi3 phimoe plamo
    plamo2 plamo3 plm pockettts qwen qwen2 qwen2moe qwen2vl qwen3 qwen35 qwen35moe qwen3moe
    qwen3next qwen3tts qwen3vl qwen3vlmoe qwen4exp refact rnd1 rwkv6 rwkv6qwen2 rwkv7 seed_oss
    smallthinker smollm3 spark2_5 stablelm starcoder starcoder2 step35 t5 t5encoder talkie
    wavtokenizer-dec xverse
    """
)

ENCODERS = _names(
    """
    bert eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert nomic-bert
    nomic-bert-moe t5encoder
    """
)
"""Models that turn a text into a vector or a score; each token sees those after it too."""

WITHOUT_TEXT = ENCODERS | _names("dflash eagle3 gemma4-assistant pockettts qwen3tts wavtokenizer-dec")
"""Encoders, draft heads and speech models: they load, but cannot answer a chat."""

WITHOUT_KV = _names(
    """
    bert dream eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llada llada-moe modern-bert neo-bert
    nomic-bert nomic-bert-moe rnd1 wavtokenizer-dec
    """
)
"""Models for which llama.cpp makes no memory at all."""

RECURRENT = _names("arwkv7 mamba mamba2 rwkv6 rwkv6qwen2 rwkv7")
"""Models with a state and no attention."""

HYBRID = _names(
    """
    bailingmoe3 deepseek4 falcon-h1 glm5-next granitehybrid jamba kimi-k3 kimi-linear lfm2 lfm2moe
    minimax-01 nemotron_h nemotron_h_moe plamo2 qwen35 qwen35moe qwen3next qwen4exp
    """
)
"""Models of which some blocks have a state and others attention."""

WITHOUT_TENSOR_SPLIT = _names(
    """
    bailingmoe3 bitnet deepseek2 deepseek32 dots3note falcon-h1 gemma3n glm-dsa glm5-next granitehybrid
    grok hy_v4 jamba kimi-k3 kimi-linear mamba mamba2 minicpm3 minimax-01 minimax-m2 minimax-m3 mistral4
    mpt nemotron_h nemotron_h_moe olmo2 olmoe plamo2 qwen3tts qwen4exp t5
    """
)
"""Models that llama.cpp refuses to split inside their matrices (LLAMA_SPLIT_MODE_TENSOR)."""

SWA_PATTERN = {
    "afmoe": (4, False),
    "cohere2": (4, False),
    "cohere2moe": (4, True),
    "exaone-moe": (4, False),
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "gpt-oss": (2, False),
    "laguna": (4, True),
    "mellum": (4, False),
    "muse-glimmer": (4, False),
    "olmo2": (4, False),
    "plamo3": (8, False),
    "smallthinker": (4, True),
}
"""Sliding windows where the file does not say which blocks have one: every nth block sees the whole
context, the last of each n (False) or the first (True)."""
