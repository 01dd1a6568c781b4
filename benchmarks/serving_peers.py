"""Other inference engines, each in a process of its own, for `benchmarks.serving`.

`python -m benchmarks.serving_peers NAME FOLDER THREADS SCRATCH` is one of them, in an environment that has it (this
module imports nothing of the project). It loads the Hugging Face folder, writes {"ready": {package: version}}, then
for each line {"load": [[prompt ids, new tokens, at], ..], "concurrency": c} serves the load and writes
{"times_s": [[..], ..], "elapsed_s": s}: for each request the times of its tokens, where the engine tells them one by
one, else none. Or {"error": why} in place of either. A request is not taken before it comes, `at` seconds after the
first could; requests stand in the order in which they come.

CTranslate2 int8      batches of c requests, each until its longest text has ended; no other interface
bitsandbytes NF4      transformers' generate on such batches
vLLM                  its engine, c requests under way, bf16 where the CPU multiplies it, else fp32
llama.cpp q4_0, q8_0  its own batches, c sequences; a file made of the folder's weights (BLOOM only: it has no OPT)

The engines' own messages go to stderr.
"""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

Load = list[tuple[list[int], int, float]]
Serve = Callable[[Load, int], list[list[float]]]
_BATCH = 2048


def in_batches(load: Load, concurrency: int, write: Callable[[list[list[int]], int], None]) -> list[list[float]]:
    """Static batching of those who have come: `write(prompts, new tokens of the longest)`."""
    began, first = time.perf_counter(), 0
    while first < len(load):
        time.sleep(max(0.0, load[first][2] - (time.perf_counter() - began)))
        now = time.perf_counter() - began
        batch = [one for one in load[first : first + concurrency] if one[2] <= now]
        write([prompt for prompt, _, _ in batch], max(count for _, count, _ in batch))
        first += len(batch)
    return [[] for _ in load]


def ctranslate2(folder: Path, threads: int, scratch: Path) -> Serve:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(folder)).convert(str(scratch / "ct2"), quantization="int8", force=True)
    generator = ctranslate2.Generator(str(scratch / "ct2"), compute_type="int8", intra_threads=threads)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = {number: word for word, number in vocabulary.items()}

    def write(prompts: list[list[int]], count: int) -> None:
        tokens = [[words[i] for i in prompt] for prompt in prompts]
        lengths = {"max_length": count, "min_length": count}
        found = generator.generate_batch(tokens, sampling_topk=1, include_prompt_in_result=False, **lengths)
        assert [len(one.sequences_ids[0]) for one in found] == [count] * len(prompts)

    return lambda load, concurrency: in_batches(load, concurrency, write)


def bitsandbytes(folder: Path, threads: int, scratch: Path) -> Serve:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    dtype = torch.bfloat16 if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else torch.float32
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype, device_map="cpu")

    def write(prompts: list[list[int]], count: int) -> None:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        lengths = {"max_new_tokens": count, "min_new_tokens": count}
        found = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
        assert found.shape == (len(prompts), width + count)

    return lambda load, concurrency: in_batches(load, concurrency, write)


def vllm(folder: Path, threads: int, scratch: Path) -> Serve:
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    config = json.loads((folder / "config.json").read_text())
    length = min(config.get("max_position_embeddings", config.get("seq_length", 2048)), 2048)
    dtype = "bfloat16" if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else "float32"
    engine = LLM(
        str(folder), skip_tokenizer_init=True, dtype=dtype, max_model_len=length, enforce_eager=True,
        enable_prefix_caching=False, seed=0,
    ).llm_engine  # fmt: skip

    def serve(load: Load, concurrency: int) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in load]
        sent, coming, under_way, began = {}, list(enumerate(load)), 0, time.perf_counter()
        while coming or under_way:
            if coming and not under_way:
                time.sleep(max(0.0, coming[0][1][2] - (time.perf_counter() - began)))
            while coming and under_way < concurrency and coming[0][1][2] <= time.perf_counter() - began:
                number, (prompt, count, _) = coming.pop(0)
                wanted = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
                sent[str(number)] = time.perf_counter()
                engine.add_request(str(number), {"prompt_token_ids": prompt}, wanted)
                under_way += 1
            for output in engine.step():
                new = len(output.outputs[0].token_ids) - len(times[int(output.request_id)])
                times[int(output.request_id)] += [time.perf_counter() - sent[output.request_id]] * new
                under_way -= output.finished
        return times

    return serve


class LlamaCpp:
    """llama.cpp's own batches of `concurrency` sequences, which come and go; `prepare` makes its cache, not timed.

    One batch at a time, of the next tokens of all that decode and whole prompts of those that come.
    """

    def __init__(self, folder: Path, threads: int, scratch: Path, kind: str):
        import llama_cpp
        import numpy as np

        self.np = np
        # In a process of its own: the plain weights are to leave memory.
        writer = multiprocessing.get_context("spawn").Process(
            target=write_gguf, args=(folder, file := scratch / f"{kind}.gguf", kind)
        )
        writer.start()
        writer.join()
        if writer.exitcode:
            raise RuntimeError(f"writing {file.name} ended with {writer.exitcode}")
        self.api, self.threads, self.contexts = llama_cpp, threads, {}
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)

    def prepare(self, concurrency: int) -> Any:
        if concurrency not in self.contexts:
            for context in self.contexts.values():
                self.api.llama_free(context)
            self.contexts.clear()
            params = self.api.llama_context_default_params()
            params.n_ctx, params.n_seq_max = 512 * concurrency, concurrency
            params.n_batch = params.n_ubatch = _BATCH
            params.n_threads = params.n_threads_batch = self.threads
            self.contexts[concurrency] = self.api.llama_init_from_model(self.model, params)
        return self.contexts[concurrency]

    def __call__(self, load: Load, concurrency: int) -> list[list[float]]:
        context, coming = self.prepare(concurrency), list(enumerate(load))
        memory, times = self.api.llama_get_memory(context), [[] for _ in load]
        free, sent, began = list(range(concurrency)), {}, time.perf_counter()
        writing: dict[int, list[int]] = {}  # by place in the cache: request, tokens there, the next one, those to come
        while coming or writing:
            if not writing:
                time.sleep(max(0.0, coming[0][1][2] - (time.perf_counter() - began)))
            tokens = [(place, at, token) for place, (_, at, token, _) in writing.items()]
            asked = {place: index for index, place in enumerate(writing)}
            now = time.perf_counter() - began
            while coming and free and coming[0][1][2] <= now and len(tokens) + len(coming[0][1][0]) <= _BATCH:
                number, (prompt, count, _) = coming.pop(0)
                place = free.pop()
                sent[number] = time.perf_counter()
                tokens += [(place, at, token) for at, token in enumerate(prompt)]
                asked[place] = len(tokens) - 1
                writing[place] = [number, len(prompt) - 1, -1, count]
            self._decode(context, tokens, set(asked.values()))
            for place, index in asked.items():
                one = writing[place]
                logits = self.np.ctypeslib.as_array(self.api.llama_get_logits_ith(context, index), (self.vocab_size,))
                one[1:] = [one[1] + 1, int(logits.argmax()), one[3] - 1]
                times[one[0]].append(time.perf_counter() - sent[one[0]])
                if one[3] == 0:
                    self.api.llama_memory_seq_rm(memory, place, -1, -1)
                    del writing[place]
                    free.append(place)
        return times

    def _decode(self, context: Any, tokens: list[tuple[int, int, int]], asked: set[int]) -> None:
        self.batch.n_tokens = len(tokens)
        for index, (place, at, token) in enumerate(tokens):
            self.batch.token[index], self.batch.pos[index] = token, at
            self.batch.n_seq_id[index], self.batch.seq_id[index][0] = 1, place
            self.batch.logits[index] = index in asked
        if code := self.api.llama_decode(context, self.batch):
            raise RuntimeError(f"llama_decode returned {code}")


def write_gguf(folder: Path, target: Path, kind: str) -> None:
    """A BLOOM of transformers as llama.cpp reads it; matrices in `kind`, the head and the embedding too."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    heads, dim, layers = config["n_head"], config["hidden_size"], config["n_layer"]
    weights = {name.removeprefix("transformer."): w for name, w in load_file(folder / "model.safetensors").items()}
    words = [f"w{number}" for number in range(config["vocab_size"])]
    out = gguf.GGUFWriter(target, "bloom")
    out.add_context_length(2048)
    out.add_embedding_length(dim)
    out.add_feed_forward_length(4 * dim)
    out.add_block_count(layers)
    out.add_head_count(heads)
    out.add_head_count_kv(heads)
    out.add_layer_norm_eps(config["layer_norm_epsilon"])
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("default")
    out.add_token_list(words)
    out.add_token_types([gguf.TokenType.NORMAL] * len(words))
    out.add_token_merges(["w 0"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    names = {"word_embeddings": "token_embd", "word_embeddings_layernorm": "token_embd_norm", "ln_f": "output_norm"}
    inner = {
        "input_layernorm": "attn_norm", "self_attention.query_key_value": "attn_qkv", "mlp.dense_4h_to_h": "ffn_down",
        "self_attention.dense": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.dense_h_to_4h": "ffn_up",
    }  # fmt: skip
    names |= {f"h.{i}.{theirs}": f"blk.{i}.{its}" for i in range(layers) for theirs, its in inner.items()}
    quantized = gguf.GGMLQuantizationType[kind.upper()]
    for name, weight in weights.items():
        stem, _, part = name.rpartition(".")
        if stem not in names:
            continue  # the head, where it is the embedding
        if stem.endswith("query_key_value"):  # rows are by head there: q, k, v of the first, of the second, ..
            weight = weight.reshape(heads, 3, dim // heads, -1).swapaxes(0, 1).reshape(weight.shape)
        if weight.ndim == 2:
            out.add_tensor(
                f"{names[stem]}.{part}", gguf.quants.quantize(weight.astype("float32"), quantized), raw_dtype=quantized
            )
        else:
            out.add_tensor(f"{names[stem]}.{part}", weight.astype("float32"))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


PEERS: dict[str, tuple[str, Callable[[Path, int, Path], Serve]]] = {
    "CTranslate2 int8": ("ctranslate2", ctranslate2),
    "bitsandbytes NF4": ("bitsandbytes", bitsandbytes),
    "vLLM": ("vllm-cpu", vllm),
    "llama.cpp q4_0": ("llama_cpp_python", lambda *given: LlamaCpp(*given, "q4_0")),
    "llama.cpp q8_0": ("llama_cpp_python", lambda *given: LlamaCpp(*given, "q8_0")),
}
"""name -> (the package that it needs, what loads it)."""


def main(arguments: list[str]) -> None:
    name, folder, threads, scratch = arguments
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever an engine prints is not an answer
    try:
        package, load = PEERS[name]
        versions = {package: version(package)}
        serve = load(Path(folder), int(threads), Path(scratch))
        print(json.dumps({"ready": versions}), file=answers)
        for line in sys.stdin:
            asked = json.loads(line)
            if isinstance(serve, LlamaCpp):
                serve.prepare(asked["concurrency"])
            began = time.perf_counter()
            times_s = serve(asked["load"], asked["concurrency"])
            print(json.dumps({"times_s": times_s, "elapsed_s": time.perf_counter() - began}), file=answers)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:300]}), file=answers)
    finally:
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # some engines do not come to an end by themselves
