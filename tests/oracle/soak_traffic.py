"""The traffic of soak_mlx_lm_server.py: clients that send what clients send, references that are repeated, tallies.

`server` below is any object with `port`, `process` and `request(method, path, body) -> (status, bytes)`.
"""
import http.client
import json
import random
import threading
import time
from collections import Counter

WORDS = ("valve pump north river seven grey ladder copper letter window engine paper winter signal bridge harbour "
         "quiet table number garden metal orange silver morning candle anchor thirty branch mirror").split()
SYSTEM = ["Answer in one sentence.", "You are a patient teacher of " + " ".join(WORDS[:12]) + ".",
          "Rules of the house: " + " ".join(WORDS) + ". Keep to them."]


# ---- tallies --------------------------------------------------------------------------------------------------------

class Tally:
    def __init__(self):
        self.lock = threading.Lock()
        self.kinds, self.expected, self.unexpected, self.wrong = Counter(), Counter(), [], []
        self.requests = self.tokens = self.prompt_tokens = self.cached = self.references = self.warm = 0

    def count(self, kind, usage=None):
        with self.lock:
            self.requests += 1
            self.kinds[kind] += 1
            if usage:
                self.tokens += usage["completion_tokens"]
                self.prompt_tokens += usage["prompt_tokens"]
                self.cached += usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)

    def refused(self, kind, status):
        with self.lock:
            self.requests += 1
            self.expected[f"{kind}: {status}"] += 1

    def fault(self, text):
        with self.lock:
            self.unexpected.append(text[:600])

    def mismatch(self, text):
        with self.lock:
            self.wrong.append(text[:600])


# ---- traffic --------------------------------------------------------------------------------------------------------

class Client(threading.Thread):
    """One seeded client; every request is checked for what holds of any answer."""

    def __init__(self, number, args, server, tally, end):
        super().__init__(daemon=True)
        self.args, self.server, self.tally, self.end_time = args, server, tally, end
        self.rng = random.Random(args.seed * 1000 + number)
        self.talk = []

    def run(self):
        kinds = [(self.chat, 30), (self.text, 20), (self.one_token, 8), (self.conversation, 25), (self.cut, 10),
                 (self.bad, 7)]
        while time.time() < self.end_time and self.server.process.poll() is None:
            act = self.rng.choices([k for k, _ in kinds], [w for _, w in kinds])[0]
            try:
                act()
            except Exception as error:  # a dropped connection, an answer that is not JSON
                self.tally.fault(f"{act.__name__}: {type(error).__name__}: {error}")
                time.sleep(0.2)
            if self.args.pause:
                time.sleep(self.args.pause)

    def words(self, most):
        count = int(most ** self.rng.random())
        return " ".join(self.rng.choice(WORDS) for _ in range(count))

    def options(self):
        rng = self.rng
        body = {"max_tokens": rng.choice([1, 2, 5, 12, 24, self.args.max_tokens])}
        if rng.random() < 0.01:
            body["max_tokens"] = 10 * self.args.max_tokens
        if rng.random() < 0.4:
            body |= {"temperature": rng.choice([0.3, 1.0]), "top_p": rng.choice([0.8, 1.0]),
                     "top_k": rng.choice([0, 20]), "min_p": rng.choice([0.0, 0.05])}
        if rng.random() < 0.2:
            body["stop"] = rng.choice(["e", ["a", "th"], [" the"], ["zzzz"]])
        if rng.random() < 0.15:
            body["logprobs"] = True
        if rng.random() < 0.1:
            body["top_logprobs"] = rng.choice([1, 4, 10])
        if rng.random() < 0.1:
            body |= {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {"5": -2.0, "9": 1.5}}
        if rng.random() < 0.05:
            body["seed"] = rng.randrange(100)  # not batchable: the server drains its batch for it
        if rng.random() < 0.1:
            body["made_up_parameter"] = {"a": [1, 2]}
        return body

    def send(self, kind, path, body):
        """Post whole or streamed; returns the answer's text."""
        body = self.options() | body
        stream = self.rng.random() < 0.5
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        status, data = self.server.request("POST", path, json.dumps(body))
        if status != 200:
            self.tally.fault(f"{kind}: status {status}: {data[:300]!r} for {json.dumps(body)[:300]}")
            return ""
        text, usage, reason = "", None, None
        if stream:
            events = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
            if not events or events[-1] != "[DONE]":
                self.tally.fault(f"{kind}: the stream does not end in [DONE]: {data[-200:]!r}")
                return ""
            answers = [json.loads(event) for event in events[:-1]]
            usage = answers[-1]["usage"]
            choices = [a["choices"][0] for a in answers if a["choices"]]
            text = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
            reason = choices[-1]["finish_reason"]
        else:
            answer = json.loads(data)
            usage, choice = answer["usage"], answer["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
            reason = choice["finish_reason"]
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        count, most = usage["completion_tokens"], body["max_tokens"]
        if reason not in ("stop", "length") or count > most or (reason == "length" and count != most) or \
                cached > usage["prompt_tokens"]:
            self.tally.fault(f"{kind}: {reason} with {usage} for max_tokens {most}")
        self.tally.count(f"{kind}, {'streamed' if stream else 'whole'}", usage)
        return text

    def messages(self):
        start = [{"role": "system", "content": self.rng.choice(SYSTEM)}] if self.rng.random() < 0.7 else []
        return start + [{"role": "user", "content": self.words(self.args.words) or "Hi"}]

    def chat(self):
        self.send("chat", self.rng.choice(["/v1/chat/completions", "/chat/completions"]), {"messages": self.messages()})

    def text(self):
        self.send("text", "/v1/completions", {"prompt": self.words(self.args.words) or "Hi"})

    def one_token(self):
        self.send("one token", "/v1/completions", {"prompt": self.rng.choice("abcdefgh")})

    def conversation(self):
        if not self.talk or len(self.talk) > 9:
            self.talk = [{"role": "system", "content": self.rng.choice(SYSTEM)}]
        self.talk.append({"role": "user", "content": self.words(20) or "Go on"})
        answer = self.send("conversation", "/v1/chat/completions", {"messages": self.talk})
        self.talk.append({"role": "assistant", "content": answer or "Yes."})

    def cut(self):
        """Read a few bytes or events of a stream, or nothing at all, and hang up."""
        body = self.options() | {"messages": self.messages(), "stream": True, "max_tokens": 2 * self.args.max_tokens}
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=300)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            if self.rng.random() < 0.3:
                time.sleep(self.rng.random() * 0.2)
            else:
                response = connection.getresponse()
                for _ in range(self.rng.randrange(6)):
                    response.readline()
        finally:
            connection.close()
        self.tally.count("cut stream")

    def bad(self):
        path, chat, hello = "/v1/completions", "/v1/chat/completions", [{"role": "user", "content": "Hi"}]
        cases = [("wrong JSON", path, "{\"prompt\": ", {400}), ("not an object", path, "[1, 2]", {400}),
                 ("no prompt", path, "{}", {400}), ("no messages", chat, "{}", {400}),
                 ("unknown path", "/v1/other", "{}", {404}),
                 ("max_tokens is text", path, json.dumps({"prompt": "a", "max_tokens": "many"}), {400}),
                 ("top_p too large", path, json.dumps({"prompt": "a", "top_p": 3}), {400}),
                 ("negative temperature", chat, json.dumps({"messages": hello, "temperature": -1}), {400}),
                 ("logit_bias is a list", chat, json.dumps({"messages": hello, "logit_bias": [1]}), {400}),
                 ("messages of numbers", chat, json.dumps({"messages": [1, 2]}), {400, 404}),
                 ("message without role", chat, json.dumps({"messages": [{"content": "Hi"}]}), {400, 404}),
                 ("prompt is a number", path, json.dumps({"prompt": 3}), {400, 404})]
        name, where, body, statuses = self.rng.choice(cases)
        status, data = self.server.request("POST", where, body)
        if status in statuses:
            self.tally.refused(name, status)
        else:
            self.tally.fault(f"{name}: status {status}: {data[:200]!r}")


# ---- references -----------------------------------------------------------------------------------------------------

def reference_cases(rng, quantised, words):
    """(path, body) at temperature 0 with the best two log probabilities of each token.

    With quantised caches an answer does depend on where earlier requests ended (rows are quantised after each), so
    the conversation, which reuses its own turns, is left out there.
    """
    fixed = {"temperature": 0, "max_tokens": 16, "top_logprobs": 2}
    cases = []  # first characters that no other prompt has: cold at first, and their rows are never shared
    for number in range(5):
        text = f"{number} reference: " + " ".join(rng.choice(WORDS) for _ in range(words * number // 4 + 1))
        cases.append(("/v1/completions", {"prompt": text} | fixed))
    if not quantised:
        talk = [{"role": "system", "content": "Reference conversation. " + SYSTEM[1]}]
        turns = []
        for turn in range(4):
            talk = talk + [{"role": "user", "content": f"{turn}: " + " ".join(rng.choice(WORDS) for _ in range(12))}]
            turns.append(("/v1/chat/completions", {"messages": talk} | fixed))
            reply = f"Answer {turn} " + " ".join(rng.choice(WORDS) for _ in range(6))
            talk = talk + [{"role": "assistant", "content": reply}]
        cases += turns[::-1]  # the longest first: on the fresh server it is cold
    return cases


def answer_of(server, path, body):
    """Best token of each step, its log probability, the lead over the second; tokens served from the prompt cache."""
    status, data = server.request("POST", path, json.dumps(body))
    if status != 200:
        raise RuntimeError(f"reference: status {status}: {data[:300]!r}")
    answer = json.loads(data)
    steps = []
    for step in answer["choices"][0]["logprobs"]["content"]:
        best, second = sorted(step["top_logprobs"], key=lambda t: -t["logprob"])
        steps.append((best["id"], best["logprob"], best["logprob"] - second["logprob"]))
    return steps, answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)


def difference(got, want, tolerance):
    """Where two answers part, or None. A step whose best two are nearer than twice the tolerance ends the search."""
    for number, (a, b) in enumerate(zip(got, want)):
        if abs(a[1] - b[1]) > tolerance:
            return f"step {number}: log probability {a[1]:.5f} instead of {b[1]:.5f} (tokens {a[0]}, {b[0]})"
        if a[2] < 2 * tolerance:
            return None
        if a[0] != b[0]:
            return f"step {number}: token {a[0]} instead of {b[0]} (lead {a[2]:.4f})"
    return None if len(got) == len(want) else f"{len(got)} steps instead of {len(want)}"


class Referee(threading.Thread):
    """Repeats the reference requests in random order beside the traffic."""

    def __init__(self, args, server, tally, cases, answers, end):
        super().__init__(daemon=True)
        self.args, self.server, self.tally, self.end_time = args, server, tally, end
        self.cases, self.answers = cases, answers
        self.rng = random.Random(args.seed)

    def run(self):
        while time.time() < self.end_time and self.server.process.poll() is None:
            number = self.rng.randrange(len(self.cases))
            try:
                got, cached = answer_of(self.server, *self.cases[number])
                parted = difference(got, self.answers[number], self.args.tolerance)
                if parted:
                    self.tally.mismatch(f"reference {number}, {cached} tokens cached: {parted}")
                self.tally.references += 1
                self.tally.warm += cached > 0
                self.tally.count("reference")
            except Exception as error:
                self.tally.fault(f"reference {number}: {type(error).__name__}: {error}")
            time.sleep(self.args.reference_pause)
