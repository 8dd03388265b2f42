"""Small engines of vLLM for the tests, and the same models in transformers.

An engine runs in this process (``alone=True``), or in a process of its own with one worker or two.
"""

import contextlib
import gc
import os

import torch

import tenterhook as th

# vLLM reads these when it is imported.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")

VOCABULARY = 200
RESID = "model.layers.*@resid"
POINT = "model.layers.1@resid"
WORKER = "tenterhook.integrations.vllm.Worker"
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, **HEADS}
WITHOUT_HEAD_SIZE = {name: value for name, value in COMMON.items() if name != "head_dim"}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# On the CPU, vLLM computes the attention of DeepSeek for heads of this size only, and its routing for groups only.
# Without YaRN, which the published models have, it turns queries in a wrong way there.
YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0}
YARN |= {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 128}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 16, "v_head_dim": 32, "q_lora_rank": None}
SHARED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32}
ROUTED = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.0, **SHARED}
FALCON = {name: value for name, value in WITHOUT_HEAD_SIZE.items() if name != "num_key_value_heads"} | {"alibi": False}
GPT = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 2, "n_positions": 512}
SCALED = {"residual_multiplier": 0.3, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 2.0}


def _configs():
    import transformers as hf

    def plain(name, **changed):
        return lambda: getattr(hf, f"{name}Config")(**{**WITHOUT_HEAD_SIZE, "max_position_embeddings": 512, **changed})

    def with_heads(name, **changed):
        return plain(name, head_dim=32, **changed)

    return {
        "llama": with_heads("Llama"),
        "mistral": with_heads("Mistral"),
        "qwen2_moe": plain("Qwen2Moe", **MIXTURE, shared_expert_intermediate_size=32),
        "qwen3": with_heads("Qwen3"),
        "qwen3_moe": with_heads("Qwen3Moe", **MIXTURE),
        "gemma2": with_heads("Gemma2", query_pre_attn_scalar=32),
        "gemma3": with_heads("Gemma3Text", query_pre_attn_scalar=32),
        "cohere": plain("Cohere"),
        "cohere2": plain("Cohere2"),
        "deepseek_v2": plain("DeepseekV2", **LATENT, **ROUTED, rope_parameters=YARN),
        "ernie4_5": with_heads("Ernie4_5"),
        "exaone4": plain("Exaone4", sliding_window=64, sliding_window_pattern=2),
        "falcon": lambda: hf.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
        "falcon_7b": lambda: hf.FalconConfig(**FALCON, multi_query=True, parallel_attn=True),
        "glm": with_heads("Glm", pad_token_id=0, partial_rotary_factor=0.5),
        "glm4": with_heads("Glm4", pad_token_id=0, partial_rotary_factor=0.5),
        "glm4_moe": with_heads("Glm4Moe", **ROUTED),
        "gpt_neox": plain("GPTNeoX", use_parallel_residual=True),
        "granite": plain("Granite", **SCALED),
        "granitemoe": plain("GraniteMoe", **SCALED, num_local_experts=4, num_experts_per_tok=2),
        "mixtral": with_heads("Mixtral", num_local_experts=4, num_experts_per_tok=2),
        "nemotron": with_heads("Nemotron"),
        "olmo2": plain("Olmo2"),
        "olmoe": plain("Olmoe", num_experts=4, num_experts_per_tok=2),
        "opt": plain("OPT", ffn_dim=96, word_embed_proj_dim=64),
        "phi": plain("Phi"),
        "phi3": plain("Phi3", pad_token_id=0),
        "stablelm": plain("StableLm", use_qkv_bias=True),
        "gpt2": lambda: hf.GPT2Config(**GPT),
        "gptj": lambda: hf.GPTJConfig(**GPT, rotary_dim=16),
    }


def model_folder(root, family="llama", dtype=torch.float32):
    """Write a small model of a family, and return its folder and the model."""
    import transformers as hf

    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(_configs()[family](), dtype=dtype, attn_implementation="eager")
    with torch.no_grad():  # Larger than at the start of a training, so that tokens differ from each other.
        for parameter in model.parameters():
            parameter.mul_(2.0)
            if parameter.dim() == 1:  # Biases are zeros at the start, so that nobody would miss them.
                parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = root / family
    if not folder.exists():
        model.save_pretrained(folder)
    return folder, model.eval()


def prompts(lengths, seed=1):
    """Return prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def as_inputs(tokens):
    return [{"prompt_token_ids": each} for each in tokens]


def greedy(count=6, **options):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, **options)


@contextlib.contextmanager
def running(folder, *, alone=True, workers=1, **options):
    """Start an engine, and shut it down at the end."""
    from vllm import LLM

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if alone and workers == 1 else "1"
    given = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "worker_extension_cls": WORKER,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "tensor_parallel_size": workers,
    }
    llm = LLM(str(folder), **(given | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        if alone and workers == 1:
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()


def serve(llm, tokens, sampling):
    """Generate for all prompts at once."""
    return llm.generate(as_inputs(tokens), sampling, use_tqdm=False)


def read_tokens(output, sample=0):
    """Return the tokens that the model read for an output: all but the last."""
    return [*output.prompt_token_ids, *output.outputs[sample].token_ids[:-1]]


def difference(one, other):
    """Return the relative difference of two tensors."""
    return ((one - other).norm() / other.norm()).item()


def continued(model, prompt, count):
    """Return what transformers generates, greedily, after the prompt. No token is padding."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def reference(model, tokens, *points):
    """Return the tape of one pass of transformers over the tokens."""
    with torch.no_grad(), th.record(model, *points) as tape:
        model(torch.tensor([tokens]))
    return tape


def assert_same(request, model, tokens):
    """The tape of a request equals that of one pass of transformers over the same tokens."""
    expected = reference(model, tokens, *request)
    for address in request:
        rows = expected[address]
        rows = rows[0].flatten(1) if rows.dim() > 2 else rows
        assert request[address].shape == rows.shape
        assert difference(request[address], rows) < 1e-4, address


def vector(seed, size=3.0):
    """Return a vector of the width of the models."""
    return torch.randn(64, generator=torch.Generator().manual_seed(seed)) * size


def generated(model, prompt, edits, count=6):
    """Return the tokens and the residual streams of transformers under edits."""
    with torch.no_grad(), th.record(model, RESID) as tape, th.edit(model, edits, numbering="run"):
        ids = continued(model, prompt, count)
    return ids[0, len(prompt) :].tolist(), {point: tape.sequence(point)[0] for point in tape._tracks}
