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


def _configs():
    import transformers as hf

    return {
        "llama": lambda: hf.LlamaConfig(**COMMON, max_position_embeddings=512),
        "qwen3": lambda: hf.Qwen3Config(**COMMON, max_position_embeddings=512),
        "gemma2": lambda: hf.Gemma2Config(**COMMON, max_position_embeddings=512, query_pre_attn_scalar=32),
        "cohere": lambda: hf.CohereConfig(**WITHOUT_HEAD_SIZE, max_position_embeddings=512),
        "phi": lambda: hf.PhiConfig(**WITHOUT_HEAD_SIZE, max_position_embeddings=512),
        "gpt2": lambda: hf.GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=3, n_head=2, n_positions=512),
        "mixtral": lambda: hf.MixtralConfig(
            **COMMON, max_position_embeddings=512, num_local_experts=4, num_experts_per_tok=2
        ),
    }


def model_folder(root, family="llama"):
    """Write a small model of a family, and return its folder and the model."""
    import transformers as hf

    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(_configs()[family](), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():  # Larger than at the start of a training, so that tokens differ from each other.
        for parameter in model.parameters():
            parameter.mul_(2.0)
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
