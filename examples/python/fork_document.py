# %% [markdown]
# # One document, five questions, one prefill
#
# A long prompt is processed once; its cache is then forked, one fork a question. A fork costs microseconds and no rows,
# and whatever an answer does to its fork, the document's cache and the other forks stay as they are.
#
#     python examples/python/fork_document.py --model FOLDER        # a model that mlx-lm can load: takes a while
#     python examples/python/fork_document.py                       # the small model that ./run test fetched
#     python examples/python/fork_document.py --smoke               # a tiny random model, in seconds
#
# Processing the document is the slow part on a CPU. It can be done once, by Reprise's own program, and read from a
# file:
#
#     python examples/python/fork_document.py --write-document manual.txt
#     ./run cache-prompt --model FOLDER --prompt - --prompt-cache-file manual.safetensors < manual.txt
#     python examples/python/fork_document.py --model FOLDER --prompt-cache-file manual.safetensors
#
# The cells below (`# %%`) are those of a notebook in VS Code, Jupyter or Spyder.

# %%
import argparse
import copy
import os
import sys
import time

try:
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.generate import generate_step
    from mlx_lm.models import cache as mlx_lm_cache  # mlx-lm's own classes, for comparison: kept before install()
except ImportError as error:
    sys.exit(f"this example needs mlx-lm: pip install 'mlx[cpu]==0.32.4' mlx-lm==0.32.2 ({error})")
TheirKVCache = mlx_lm_cache.KVCache
try:
    import reprise.mlx_lm
    from reprise.cache import KVCache, fork_prompt_cache, load_prompt_cache_file, make_prompt_cache, prompt_cache_nbytes
except ImportError as error:
    sys.exit(f"this example needs reprise: pip install ./python, or PYTHONPATH=BUILD/python ({error})")

FETCHED = ".cache/models/smollm2-mlx"  # by ./run test, in the root of the checkout
parser = argparse.ArgumentParser(description="Fork a long document prompt five ways.")
default_model = os.environ.get("REPRISE_MLX_MODEL") or (FETCHED if os.path.isdir(FETCHED) else None)
parser.add_argument("--model", default=default_model,
                    help=f"model folder or Hugging Face id for mlx-lm (default: $REPRISE_MLX_MODEL, else {FETCHED})")
parser.add_argument("--words", type=int, default=330, help="how much of the manual (all of it: 1200; default 330)")
parser.add_argument("--max-tokens", type=int, default=24, help="length of an answer")
parser.add_argument("--prompt-cache-file", help="the document's cache, written by `reprise cache-prompt`")
parser.add_argument("--write-document", metavar="FILE", help="write the document's text and end")
parser.add_argument("--smoke", action="store_true", help="a tiny random model and short synthetic caches")
arguments = parser.parse_known_args()[0]  # a notebook's own arguments are not ours

# From here on mlx-lm runs on Reprise's caches.
reprise.mlx_lm.install()

# %% [markdown]
# ## The document
# The service manual of a machine that does not exist. What the questions ask for is told once each, in the first part.

# %%
MANUAL = """
Service Manual of the Halden T40 Tide Clock. Second edition.

1. What it is. The Halden T40 is a mechanical tide clock for small harbours. It shows the height of the water, the
time to the next high tide, and rings a brass bell when a ship may pass the bar. It was designed by Marta Lindqvist in
the town of Halden and built between 1931 and 1958. Two hundred and twelve were made. Each has a number stamped under
the left foot of the case; numbers below 40 belong to the first series, which has a wooden dial.

2. Power. The clock is driven by a weight of 18 kilograms on a steel cable. One winding lasts nine days. Wind it with
the long crank, never with the short one, which is for the bell. Stop when the red mark on the cable reaches the drum.
The bell has a spring of its own and needs eleven turns of the short crank each Monday.

3. Oil. Use only whale-free clock oil of grade 3. Three drops go on the main bearing every six months, one drop on
each pinion once a year. Never oil the float chain: oil gathers sand, and sand wears the links. The chain is cleaned
with alcohol and a soft brush.

4. The float. The float hangs in a bronze pipe that leads to the sea. It is made of cork and painted green. If the
float sticks, the hand trembles at low tide. Close the blue valve first, then open the cover with the four square
screws, and lift the float by its ring. A float that weighs more than 640 grams has taken in water and must be
replaced.

5. Setting. To set the clock, find the height of the water on the harbour staff, pull the small knob behind the dial,
and turn the hand to that height. Then push the knob back until it clicks. Setting should be done at slack water, when
the sea is still for about twenty minutes. Write the date and your name in the book that lies in the drawer.

6. Faults. If the clock stops, look at the weight first: most calls are for a clock that nobody has wound. If the
weight is up and the pendulum does not swing, the suspension spring is broken; spare springs are in the tin with the
yellow lid. If the clock runs fast, turn the nut under the pendulum to the left, one mark for each ten seconds a day.
If it runs slow, turn it to the right. If the bell rings at the wrong height, the cam has slipped on its shaft: align
the two dots and tighten the screw with the key number 5.

7. Winter. When ice is expected, raise the float by half a metre with the winter hook and hang the sign "ice" on the
dial. The clock goes on showing the time to high tide from its wheels alone, but no longer the height. In hard winters
the pipe may freeze; never use a flame. Pour in warm salt water, one bucket at a time, until the chain moves freely.
After the thaw, lower the float slowly and set the clock again as in section 5.

8. The wheels. The train has seven wheels. The first, with 96 teeth, carries the drum and turns once in a day and a
half. The third carries the tide cam, a heart of hard bronze that was cut by hand for each harbour; clocks must
therefore not be exchanged between harbours. The letter on the cam names the place: H for Halden, S for Strand, K for
Kvitvik. The last wheel drives the pendulum through an anchor of steel. Its two faces wear; when a groove can be felt
with a fingernail, send the anchor to the workshop and put in the spare one, which is screwed to the inside of the
door.

9. The dial. The dial has two rings. The outer ring shows the height in decimetres, from zero to fifty. The inner ring
shows the hours to high water. The thin hand is gilded and bends easily: take it off with the brass fork, never with
pliers. The numerals are painted with a black lacquer that stands salt; clean them with distilled water only. On
clocks of the first series the wooden dial swells in wet summers, and the hand may rub. Loosen the three dial screws
by half a turn and tighten them again in September.

10. The bell. The bell is cast in the note A. It rings four times when the water over the bar reaches three metres,
and once when it falls below. The hammer has a leather cap; a clock without it sounds harsh and cracks the bell within
some years. Caps are cut from harness leather, two millimetres thick, and tied with waxed thread. For nights the bell
is silenced with the lever on the right side. A silenced bell still moves its counter, so that the keeper sees in the
morning how often a ship could have passed.

11. The yearly service. Once a year, in May, the clock is taken apart as far as the third wheel. Lift the weight off
before anything else: a falling weight has gone through more than one floor. Wash the wheels in petrol, the bearings
in alcohol, and let them dry in the sun. Look at each tooth. Put the train together from below, and turn it by hand
through one whole day before the weight goes on. Note the state of the cable: more than five broken wires in one
place, and it is changed. A service takes two persons one day.

12. Spare parts. Springs, caps, pins and screws are kept by the harbour office. Cams are cut by the workshop in Halden
and take three months. Floats come from the cork works in Moss; order them by the length of the chain, and say whether
the pipe is straight or bent. The paper for the recorder, where one is fitted, is sold in rolls of one year. Ask for
the roll with the green edge: the red one is for barometers, and its lines are nearer together.

13. The recorder. Clocks from number 120 on may carry a recorder, a drum with a pen that draws the height over a week.
The pen is filled with glycerine ink, which does not freeze. Change the paper on Monday, when the bell is wound. If
the line is thick, the pen is worn; if it is broken, the drum is dirty. The drum turns once in seven days and four
hours, so that the ends of the line can be told apart.

14. History. The first clock went to the pilots of Halden, who had lost two boats on the bar in one autumn. It still
runs. The fourteenth was shown in Gothenburg in 1934 and won a silver medal. During the war the bells were taken down
and hidden in a boathouse; eleven were never found. The last clock, number 212, was delivered without a cam, because
its harbour had not been dug yet. It stands in the museum, and children may wind it.
"""
QUESTIONS = [
    "Who designed the tide clock?",
    "How long does one winding of the clock last?",
    "How many turns of the short crank does the bell need each Monday?",
    "What is the float made of, and which colour is it?",
    "Which valve is closed before the cover is opened?",
]
DOCUMENT = " ".join(MANUAL.split()[: arguments.words])
if arguments.write_document:
    with open(arguments.write_document, "w", encoding="utf-8") as out:
        out.write(DOCUMENT)
    print(f"{arguments.write_document}: {len(DOCUMENT.split())} words")
    sys.exit()

# %% [markdown]
# ## The model, and the five prompts as token ids
# What the five prompts begin with in common is the document (with the template's words before it). It is found by
# comparing ids, so no seam between texts can go wrong.


# %%
def tiny_model():
    """A random Llama and an encoding by bytes, in place of a real model for --smoke."""
    from mlx_lm.models import llama

    mx.random.seed(3)
    tiny = llama.Model(llama.ModelArgs.from_dict({
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 256}))
    for layer in tiny.layers:  # answers that hang on the whole context
        for projection in layer.self_attn.children().values():
            if "weight" in projection:
                projection.weight = projection.weight * 3
    return tiny


def encode(question):
    text = f"{DOCUMENT}\n\nQuestion: {question}"
    if arguments.smoke:
        return list(text.encode())
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))


def decode(ids):
    return repr(bytes(ids)) if arguments.smoke else tokenizer.decode(ids).strip()


if arguments.smoke:
    DOCUMENT, arguments.max_tokens = DOCUMENT[:300], 8
    model, tokenizer = tiny_model(), None
else:
    if not arguments.model:
        sys.exit("which model? --model FOLDER (config.json, safetensors, tokenizer.json) or $REPRISE_MLX_MODEL; "
                 "or --smoke, which needs none")
    try:
        model, tokenizer = mlx_lm.load(arguments.model)
    except Exception as error:  # the hub cannot be reached, no such folder, an unknown architecture
        sys.exit(f"mlx-lm cannot load {arguments.model}: {type(error).__name__}: {error}")
prompts = [encode(question) for question in QUESTIONS]
common = next(i for i in range(len(prompts[0])) if len({tuple(p[i : i + 1]) for p in prompts}) > 1)
document_ids = prompts[0][:common]

# %% [markdown]
# ## The document once

# %%


def feed(cache, ids):
    """Process ids on a cache; returns the logits after the last one, computed."""
    logits = model(mx.array([ids]), cache=cache)[0, -1].astype(mx.float32)
    mx.eval(logits, [c.state for c in cache])
    return logits


start = time.perf_counter()
if arguments.prompt_cache_file:
    loaded = load_prompt_cache_file(arguments.prompt_cache_file)
    document, known = loaded.cache, loaded.tokens or document_ids[: loaded.cache[0].offset]
    # The program renders its prompt up to the end of the document; from there on our prompts go on.
    if not all(prompt[: len(known)] == known for prompt in prompts):
        sys.exit(f"{arguments.prompt_cache_file} holds {len(known)} tokens that do not begin this document: "
                 f"write the document with --write-document and the same --words {arguments.words}")
    document_ids = known
    what = "read from its file"
else:
    document = make_prompt_cache(model)
    # max_tokens = 0: mlx-lm processes the prompt and generates nothing.
    for _ in generate_step(mx.array(document_ids), model, max_tokens=0, prompt_cache=document):
        pass
    what = "processed"
seconds = time.perf_counter() - start
print(f"document: {len(document_ids)} tokens {what} in {seconds:.2f} s, {prompt_cache_nbytes(document) / 1e6:.2f} MB "
      f"in {len(document)} layers of {type(document[0]).__name__}\n")


# %% [markdown]
# ## Five forks, five answers
# Each answer is mlx-lm's own generation, given a fork and only what follows the document.

# %%


def active():
    mx.synchronize()
    return mx.get_active_memory()


untouched = [mx.array(c.keys_and_values()[0]) for c in document]  # to be compared at the end
answers = []
for question, prompt in zip(QUESTIONS, prompts):
    before, start = active(), time.perf_counter()
    fork = fork_prompt_cache(document)
    forked = time.perf_counter() - start
    mx.eval([c.state for c in fork])
    new_bytes, start = max(0, active() - before), time.perf_counter()
    ids = []
    for token, _ in generate_step(mx.array(prompt[len(document_ids):]), model, max_tokens=arguments.max_tokens,
                                  prompt_cache=fork):
        if tokenizer is not None and int(token) in tokenizer.eos_token_ids:
            break
        ids.append(int(token))
    answers.append((fork, ids))
    print(f"fork {forked * 1e6:6.0f} µs, {new_bytes} new bytes; answer in {time.perf_counter() - start:.2f} s\n"
          f"  {question}\n  {decode(ids)}")


# %% [markdown]
# ## They do not disturb each other
# The document's rows are what they were, and each fork answers as a run that never shared anything: a cache of mlx-
# lm's own, processed from the first token, gives the same logits at the end of the question. (Cold runs are slow:
# with a real model only one question is asked that way. It must be fed in the same two pieces, since MLX rounds
# differently for other shapes.)

# %%
for layer, (cache, rows) in enumerate(zip(document, untouched)):
    if not mx.array_equal(cache.keys_and_values()[0], rows):
        sys.exit(f"WRONG: layer {layer} of the document has changed")
worst = 0.0
checked = range(len(prompts)) if arguments.smoke else [len(prompts) - 1]
for number in checked:
    cold = [TheirKVCache() for _ in document]
    feed(cold, document_ids)
    want = feed(cold, prompts[number][len(document_ids):])
    got = feed(fork_prompt_cache(document), prompts[number][len(document_ids):])
    worst = max(worst, (mx.max(mx.abs(got - want)) / mx.max(mx.abs(want))).item())
# A document from the program's file is rounded by other kernels than mlx-lm's.
allowed = 5e-2 if arguments.prompt_cache_file else 1e-3
print(f"\n{len(checked)} of {len(prompts)} questions asked cold as well: logits differ by at most {worst:.1e} of the "
      f"largest (allowed {allowed:.0e})")
if not worst <= allowed:
    sys.exit("WRONG: a fork answers differently from a cold run")

# %% [markdown]
# ## Fork and deepcopy, by length
# mlx-lm's way to the same end is `copy.deepcopy` of its list of caches. With MLX 0.32.4 that shares buffers too, so
# neither allocates anything until somebody writes; then MLX copies the buffer, once for each branch. What differs is
# the time that the branching itself takes. (On our caches `copy.deepcopy` *is* a fork, so code that uses it gains
# unchanged.)


# %%
def branch_costs(kind, branch, tokens, layers, heads, head_dim, dtype):
    """(median seconds of a branch, new bytes of one, seconds of the first token written to one, bytes it took)"""
    caches = [kind() for _ in range(layers)]
    for cache in caches:
        rows = mx.random.normal((1, heads, tokens, head_dim)).astype(dtype)
        cache.update_and_fetch(rows, rows + 1)
    mx.eval([c.state for c in caches])
    times, branches, before = [], [], active()
    for _ in range(5):
        start = time.perf_counter()
        branches.append(branch(caches))
        times.append(time.perf_counter() - start)
    mx.eval([[c.state for c in b] for b in branches])
    new_bytes = max(0, active() - before) // len(branches)
    row = mx.zeros((1, heads, 1, head_dim), dtype)
    before, start = active(), time.perf_counter()
    mx.eval([cache.update_and_fetch(row, row) for cache in branches[0]])
    mx.synchronize()
    wrote = time.perf_counter() - start
    taken = active() - before
    del caches, branches
    mx.clear_cache()
    return sorted(times)[2], new_bytes, wrote, taken


WAYS = [("reprise fork", KVCache, fork_prompt_cache), ("mlx-lm deepcopy", TheirKVCache, copy.deepcopy)]
keys = document[0].keys
shape = dict(layers=len(document), heads=keys.shape[1], head_dim=keys.shape[3], dtype=keys.dtype)
print(f"\n{shape['layers']} layers, {shape['heads']} heads of {shape['head_dim']}, {keys.dtype}: one branch, and the "
      f"first token written to it\n{'tokens':>7} {'':18} {'µs':>7} {'new bytes':>10} {'first write ms':>15} {'MB':>8}")
for tokens in [len(document_ids)] + ([1024] if arguments.smoke else [8192, 32768]):
    for name, kind, branch in WAYS:
        taken, new_bytes, wrote, wrote_bytes = branch_costs(kind, branch, tokens, **shape)
        print(f"{tokens:7} {name:18} {taken * 1e6:7.0f} {new_bytes:10} {wrote * 1e3:15.2f} {wrote_bytes / 1e6:8.2f}")
        if new_bytes > 4096 * len(document) and kind is KVCache:
            sys.exit("WRONG: a fork has copied rows")
print("\nthe forks left the document and each other alone")
