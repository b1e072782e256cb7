#!/usr/bin/env python3
"""Tests of serve with the clients that people use: OpenAI's for Python, curl, sockets, and a browser for its page.

    test_clients.py [CLASS[.TEST]...]

SERVE is the program, target/debug/serve unless set; the model is the one of fetch_model.sh. Runs itself by the Python
that fetch_clients.sh has put below target/. No wait has a deadline: scripts/watch.py ends what prints nothing.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.parse
import urllib.request

import browser

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = os.path.join(ROOT, os.environ.get("CARGO_TARGET_DIR", "target"))
PYTHON = os.path.join(TARGET, "clients", "venv", "bin", "python")
MODEL = os.path.join(ROOT, "models", "SmolLM2-135M-Instruct.Q4_1.gguf")
REQUIRED = os.environ.get("OUTCORE_REQUIRE", "").split(",")
NAME = "smol"
# The weights have 98 MB, so that pages move all the time.
MEMORY = ["--memory", "200MiB", "--kv-space", "64MiB"]
QUESTION = "Explain virtual memory in two sentences."
# A beginning, and its tokens.
BEGINNING, IDS = " the capital of France", [260, 3575, 282, 4649]
LOOK_EVERY_SECONDS = 0.05

try:
    import openai
except ImportError:
    openai = None


def until(condition):
    """Waits until a function returns what is true, and returns that."""
    while not (found := condition()):
        time.sleep(LOOK_EVERY_SECONDS)
    return found


class Serve:
    """A server, until the end of `with`."""

    def __init__(self, *options):
        self.folder = tempfile.mkdtemp(prefix="outcore-clients-")
        self.log_path = os.path.join(self.folder, "log")
        program = os.environ.get("SERVE", os.path.join(TARGET, "debug", "serve"))
        memory = [] if "--memory" in options else MEMORY
        command = [program, "--model", MODEL, "--name", NAME, "--port", "0", *memory, *options]
        with open(self.log_path, "w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            self.process.wait()
            raise AssertionError(f"serve did not start: {self.log()}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        shutil.rmtree(self.folder)

    def log(self):
        with open(self.log_path) as log:
            return log.read()

    def client(self, key="none", **options):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=None, **options)

    def get(self, path, key=None):
        """Returns status and text."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers)) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, name):
        """Returns the value of a metric, whose name has its labels."""
        _, text = self.get("/metrics")
        values = [line.rsplit(" ", 1) for line in text.splitlines()]
        return next(float(value) for key, value in values if key in (name, name + "{}"))

    def post(self, path, body):
        """Returns the status, when all of the answer has come; none, if the connection ended before that."""
        headers = {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, body, headers)) as answer:
                answer.read()
                return answer.status
        except urllib.error.HTTPError as error:
            with error:
                error.read()
                return error.code
        except OSError:
            # Refused while the body was sent.
            return None

    def peak(self):
        """Returns the most bytes that were resident."""
        with open(f"/proc/{self.process.pid}/status") as status:
            [line] = [line for line in status if line.startswith("VmHWM:")]
        return int(line.split()[1]) << 10

    def signal(self):
        self.process.send_signal(signal.SIGTERM)

    def status(self):
        """Returns the exit status, when it has ended."""
        return self.process.wait()


def chat(client, messages, **options):
    """A chat completion at temperature 0 unless said; a text is the only message."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return client.chat.completions.create(model=NAME, messages=messages, **{"temperature": 0, **options})


def said(answer):
    return answer.choices[0].message.content


def pieces(stream):
    """Returns the text, the reason of its end and the usage of a stream."""
    text, finish, usage = "", None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish, usage


class OfOneServer(unittest.TestCase):
    """Tests that share a server."""

    options = []

    @classmethod
    def setUpClass(cls):
        cls.serve = Serve(*cls.options)
        cls.addClassCleanup(cls.serve.__exit__)
        cls.client = cls.serve.client()

    def refused(self, kind, param, code, request, *arguments, **options):
        with self.assertRaises(kind) as caught:
            request(*arguments, **options)
        self.assertEqual((caught.exception.param, caught.exception.code), (param, code), caught.exception.message)
        return caught.exception


class Api(OfOneServer):
    def test_the_model_is_listed(self):
        [model] = self.client.models.list().data
        self.assertEqual((model.id, model.object, model.owned_by), (NAME, "model", "outcore"))
        self.assertEqual(self.client.models.retrieve(NAME).id, NAME)
        self.refused(openai.NotFoundError, "model", "model_not_found", self.client.models.retrieve, "nothing")

    def test_whole_and_streamed_answers_are_the_same(self):
        whole = chat(self.client, QUESTION, max_tokens=40)
        usage = {"stream_options": {"include_usage": True}}
        text, finish, used = pieces(chat(self.client, QUESTION, max_tokens=40, stream=True, **usage))
        self.assertTrue(text)
        self.assertEqual((text, finish), (said(whole), whole.choices[0].finish_reason))
        self.assertEqual((used.prompt_tokens, used.completion_tokens, used.total_tokens),
                         (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens))
        cut = chat(self.client, QUESTION, max_tokens=4)
        self.assertEqual((cut.choices[0].finish_reason, cut.usage.completion_tokens), ("length", 4))
        self.assertTrue(text.startswith(said(cut)))

    def test_two_choices_and_their_seeds(self):
        options = {"temperature": 1, "max_tokens": 12}
        both = chat(self.client, QUESTION, n=2, seed=7, **options)
        self.assertEqual([choice.index for choice in both.choices], [0, 1])
        texts = [choice.message.content for choice in both.choices]
        self.assertNotEqual(*texts)
        again = chat(self.client, QUESTION, n=2, seed=7, **options)
        self.assertEqual([choice.message.content for choice in again.choices], texts)
        self.assertEqual([said(chat(self.client, QUESTION, seed=seed, **options)) for seed in (7, 8)], texts)
        self.assertEqual(both.usage.completion_tokens, 24)
        streams = {0: "", 1: ""}
        for chunk in chat(self.client, QUESTION, n=2, seed=7, stream=True, **options):
            for choice in chunk.choices:
                streams[choice.index] += choice.delta.content or ""
        self.assertEqual(list(streams.values()), texts)

    def test_a_stop_sequence_ends_the_answer_before_it(self):
        text = said(chat(self.client, QUESTION, max_tokens=40))
        stop = text.split()[5]
        for wanted in (stop, ["never said", stop]):
            answer = chat(self.client, QUESTION, max_tokens=40, stop=wanted)
            self.assertEqual((said(answer), answer.choices[0].finish_reason), (text[:text.find(stop)], "stop"))
        streamed = pieces(chat(self.client, QUESTION, max_tokens=40, stop=stop, stream=True))
        self.assertEqual(streamed[:2], (text[:text.find(stop)], "stop"))

    def test_logprobs_name_each_token(self):
        answer = chat(self.client, QUESTION, max_tokens=8, logprobs=True, top_logprobs=3)
        tokens = answer.choices[0].logprobs.content
        self.assertEqual(len(tokens), answer.usage.completion_tokens)
        self.assertEqual(bytes(byte for token in tokens for byte in token.bytes).decode(), said(answer))
        for token in tokens:
            self.assertEqual(len(token.top_logprobs), 3)
            self.assertEqual((token.token, token.logprob), (token.top_logprobs[0].token, token.top_logprobs[0].logprob))
            order = [other.logprob for other in token.top_logprobs]
            self.assertEqual(order, sorted(order, reverse=True))
            self.assertLessEqual(order[0], 0)
        streamed = chat(self.client, QUESTION, max_tokens=8, logprobs=True, top_logprobs=3, stream=True)
        choices = [chunk.choices[0] for chunk in streamed if chunk.choices]
        self.assertEqual([token for choice in choices if choice.logprobs for token in choice.logprobs.content], tokens)

    def test_completions_take_text_and_token_ids(self):
        create = lambda prompt, **more: self.client.completions.create(
            model=NAME, prompt=prompt, temperature=0, **{"max_tokens": 8, **more})
        text = BEGINNING
        of_text, of_ids = create(text), create(IDS)
        self.assertTrue(of_text.choices[0].text)
        self.assertEqual(of_text.usage.prompt_tokens, len(IDS))
        self.assertEqual(of_text.choices[0].text, of_ids.choices[0].text)
        self.assertEqual(create(text, echo=True).choices[0].text, text + of_text.choices[0].text)
        several = create([text, "Once upon a time"])
        self.assertEqual(several.choices[0].text, of_text.choices[0].text)
        self.assertEqual(several.choices[1].text, create("Once upon a time").choices[0].text)
        self.assertEqual(create([IDS, IDS]).choices[1].text, of_ids.choices[0].text)
        streamed = "".join(choice.text for chunk in create(text, stream=True) for choice in chunk.choices)
        self.assertEqual(streamed, of_text.choices[0].text)
        named = create(text, logprobs=2).choices[0].logprobs
        self.assertEqual("".join(named.tokens), of_text.choices[0].text)
        self.assertEqual(named.text_offset[0], 0)

    def test_embeddings_are_read_back_and_near_texts_are_near(self):
        create = lambda given, **more: self.client.embeddings.create(model=NAME, input=given, **more)
        texts = ["The cat sat on the mat.", "A cat is sitting on a mat.", "Interest rates rose by two percent."]
        answer = create(texts)
        self.assertEqual([one.index for one in answer.data], [0, 1, 2])
        self.assertEqual(answer.usage.prompt_tokens, answer.usage.total_tokens)
        vectors = [one.embedding for one in answer.data]
        near = lambda a, b: sum(x * y for x, y in zip(a, b))
        self.assertAlmostEqual(near(vectors[0], vectors[0]), 1, places=5)
        self.assertGreater(near(vectors[0], vectors[1]), near(vectors[0], vectors[2]))
        # The client asks for base64 unless told.
        floats = create(texts[0], encoding_format="float").data[0].embedding
        self.assertEqual(len(floats), len(vectors[0]))
        for one, other in zip(floats, vectors[0]):
            self.assertAlmostEqual(one, other, places=7)
        self.assertEqual(create(BEGINNING).data[0].embedding, create(IDS).data[0].embedding)
        self.assertEqual(create([IDS, IDS]).data[1].embedding, create(IDS).data[0].embedding)
        short = create(texts[0], dimensions=32).data[0].embedding
        self.assertEqual(len(short), 32)
        self.assertAlmostEqual(near(short, short), 1, places=5)

    def test_the_second_turn_of_a_conversation_finds_the_first(self):
        first = [{"role": "user", "content": "How do birds find their way? " * 4}]
        answer = chat(self.client, first, max_tokens=60)
        second = [*first, {"role": "assistant", "content": said(answer)}, {"role": "user", "content": "Go on."}]
        usage = chat(self.client, second, max_tokens=4).usage
        self.assertGreater(usage.prompt_tokens_details.cached_tokens, 0)
        self.assertLess(usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens)

    def test_an_answer_has_the_form_that_is_asked_for(self):
        properties = {"city": {"type": "string", "maxLength": 20}, "inhabitants": {"type": "integer"}}
        schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": schema}}
        answer = chat(self.client, "Describe Paris.", response_format=form, max_tokens=200)
        described = json.loads(said(answer))
        self.assertEqual((set(described), type(described["inhabitants"])), (set(properties), int))

    def test_a_wrong_request_is_refused_by_name(self):
        ask = lambda **options: chat(self.client, QUESTION, **options)
        wrong = openai.BadRequestError
        self.refused(wrong, "temperature", "invalid_value", ask, temperature=3)
        self.refused(wrong, "temperature", "invalid_type", ask, temperature="warm")
        self.refused(wrong, "max_tokens", "invalid_value", ask, max_tokens=0)
        self.refused(wrong, "messages", "context_length_exceeded", ask, max_tokens=1 << 20)
        self.refused(wrong, "messages", "invalid_value", chat, self.client, [])
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        # The model's template does not mention tools.
        self.refused(wrong, "tools", "unsupported_value", ask, tools=[tool])
        self.refused(wrong, "tools[0].type", "invalid_value", ask, tools=[{"type": "custom", "custom": {"name": "f"}}])
        self.refused(wrong, "response_format.type", "invalid_value", ask, response_format={"type": "xml"})
        # Fields that nobody knows have no effect.
        ask(max_tokens=1, extra_body={"colour": 1, "min_p": 0.1})
        picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        messages = [{"role": "user", "content": picture}]
        self.refused(wrong, "messages[0].content[0]", "invalid_value", chat, self.client, messages)
        create = self.client.chat.completions.create
        messages = [{"role": "user", "content": QUESTION}]
        self.refused(openai.NotFoundError, "model", "model_not_found", create, model="other", messages=messages)
        embed = lambda **options: self.client.embeddings.create(**{"model": NAME, "input": "x", **options})
        self.refused(wrong, "input", "invalid_value", embed, input="")
        self.refused(wrong, "input[1]", "invalid_value", embed, input=["x", ""])
        self.refused(wrong, "dimensions", "invalid_value", embed, dimensions=1 << 20)
        self.refused(openai.NotFoundError, "model", "model_not_found", embed, model="other")

    def test_the_log_has_no_words_of_users(self):
        secret = "Pernambuco"
        answer = chat(self.client, f"Say {secret}.", max_tokens=6)
        self.refused(openai.BadRequestError, "stop", "invalid_value", chat, self.client, secret, stop=[secret] * 5)
        log = until(lambda: "status=400" in self.serve.log() and self.serve.log())
        self.assertNotIn(secret, log)
        self.assertNotIn(said(answer), log)


class OtherClients(OfOneServer):
    def curl(self, *arguments, **body):
        command = ["curl", "-s", "--fail-with-body", *arguments, f"{self.serve.url}/v1/chat/completions"]
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24, **body}
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True)

    @unittest.skipUnless(shutil.which("curl"), "there is no curl")
    def test_curl(self):
        whole = self.curl()
        self.assertEqual(whole.returncode, 0)
        text = json.loads(whole.stdout)["choices"][0]["message"]["content"]
        streamed = self.curl("-N", stream=True).stdout
        events = [event.removeprefix("data: ") for event in streamed.split("\n\n") if event.startswith("data: ")]
        self.assertEqual(events.pop(), "[DONE]")
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        self.assertEqual("".join(delta.get("content", "") for delta in deltas), text)
        wrong = self.curl(n=0)
        self.assertEqual((wrong.returncode, json.loads(wrong.stdout)["error"]["param"]), (22, "n"))

    def test_a_client_that_goes_away_leaves_nothing(self):
        used = 'outcore_kv_blocks{state="used"}'
        before = until(lambda: self.serve.metric("outcore_running_answers") == 0) and self.serve.metric(used)
        where = urllib.parse.urlsplit(self.serve.url)
        body = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        body = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n" \
               f"Content-Length: {len(body)}\r\n\r\n"
        # Closed altogether; and only its own half, which counts as gone, too.
        for close in (socket.socket.close, lambda client: client.shutdown(socket.SHUT_WR)):
            with socket.create_connection((where.hostname, where.port)) as client:
                client.sendall(head.encode() + body)
                heard = b""
                while heard.count(b"data: ") < 4:
                    more = client.recv(4096)
                    self.assertTrue(more, heard)
                    heard += more
                self.assertEqual(self.serve.metric("outcore_running_answers"), 1)
                self.assertGreater(self.serve.metric(used), before)
                close(client)
                until(lambda: self.serve.metric("outcore_running_answers") == 0)
                self.assertEqual(self.serve.metric(used), before)
        self.assertEqual(self.serve.metric("outcore_waiting_answers"), 0)
        # And others are served.
        self.assertTrue(said(chat(self.client, QUESTION, max_tokens=4)))


class Tenants(OfOneServer):
    KEYS = {"few": "key-of-few-answers", "slow": "key-of-few-tokens", "free": "key-without-quotas"}
    QUOTAS = {"few": {"concurrency": 1}, "slow": {"tokens_per_minute": 1}, "free": {"operator": True}}

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        path = os.path.join(folder.name, "tenants.json")
        tenants = [{"name": name, "token": key, **cls.QUOTAS[name]} for name, key in cls.KEYS.items()]
        with open(path, "w") as file:
            json.dump({"tenants": tenants}, file)
        cls.options = ["--tenants", path]
        super().setUpClass()

    def test_without_a_token_nobody_is_served(self):
        for client in (self.client, self.serve.client(self.KEYS["free"] + "x")):
            self.refused(openai.AuthenticationError, None, "invalid_api_key", client.models.list)
            self.refused(openai.AuthenticationError, None, "invalid_api_key", chat, client, QUESTION)
        for path in ("/metrics", "/pages", "/v1/models"):
            self.assertEqual(self.serve.get(path)[0], 401)
            self.assertEqual(self.serve.get(path, self.KEYS["free"])[0], 200)
        # What all tenants do is for operators.
        for path, status in (("/metrics", 403), ("/pages", 403), ("/v1/models", 200)):
            self.assertEqual(self.serve.get(path, self.KEYS["slow"])[0], status)
        for path in ("/health", "/ready", "/"):
            self.assertEqual(self.serve.get(path)[0], 200)
        self.assertTrue(said(chat(self.serve.client(self.KEYS["free"]), QUESTION, max_tokens=4)))
        for key in self.KEYS.values():
            self.assertNotIn(key, self.serve.log())

    def test_quotas(self):
        few, slow, free = [self.serve.client(self.KEYS[name]) for name in ("few", "slow", "free")]
        limit = openai.RateLimitError
        # More than it may ever have is no reason to try again.
        self.refused(openai.BadRequestError, "n", "invalid_value", chat, few, QUESTION, n=2, max_tokens=4)
        with chat(few, QUESTION, stream=True, max_tokens=4000, extra_body={"ignore_eos": True}) as running:
            next(iter(running))
            self.refused(limit, None, "rate_limit_exceeded", chat, few, QUESTION, max_tokens=4)
            self.assertTrue(said(chat(free, QUESTION, max_tokens=4)))
        # When it is gone, there is room again.
        def again():
            with contextlib.suppress(limit):
                return chat(few, QUESTION, max_tokens=4)
        until(again)
        chat(slow, QUESTION, max_tokens=4)
        refused = self.refused(limit, None, "rate_limit_exceeded", chat, slow, QUESTION, max_tokens=4)
        self.assertGreater(int(refused.response.headers["Retry-After"]), 60)


class Memory(unittest.TestCase):
    """Whatever clients send, the process keeps within --memory."""

    LIMIT = 300_000_000
    # Nearly the longest that it takes with so little memory.
    BODY = 2_600_000
    # Small values, of which parsers make large ones: in a member that is refused, in one without effect, in a prompt.
    HOSTILE = [('{"prompt":"a","x":[', '{"":0},', '0]}'), ('{"prompt":"a","x":[', "[0],", "0]}"),
               ('{"prompt":"a","x":[', "1,", "0]}"), ('{"prompt":"a","metadata":[', '{"":0},', '0]}'),
               ('{"prompt":[', "1,", "1]}"), ('{"prompt":"', "a", '"}'), ('{"prompt":"', "\\u0001", '"}'),
               ('{"prompt":"a",', '"":0,', '"n":1}'), ('{"prompt":', "[", "")]

    def bodies(self, length):
        return [(begin + part * ((length - len(begin) - len(end)) // len(part)) + end).encode()
                for begin, part, end in self.HOSTILE]

    def test_bodies_and_logprobs_keep_within_it(self):
        with Serve("--memory", str(self.LIMIT), "--kv-space", "64MiB") as serve:
            statuses = [serve.post("/v1/completions", body) for body in self.bodies(self.BODY)]
            self.assertLessEqual(set(statuses), {200, 400}, statuses)
            # Several at once, beside an answer of many tokens.
            statuses = []
            ask = lambda path, body: statuses.append(serve.post(path, body))
            threads = [threading.Thread(target=ask, args=("/v1/completions", body))
                       for body in self.bodies(self.BODY // 4) * 4]
            options = {"n": 40, "max_tokens": 120, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
            body = json.dumps({"messages": [{"role": "user", "content": QUESTION}], **options}).encode()
            threads.append(threading.Thread(target=ask, args=("/v1/chat/completions", body)))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertLessEqual(set(statuses), {200, 400, 503, None}, statuses)
            self.assertEqual(serve.post("/v1/chat/completions", body), 200)
            self.assertLessEqual(serve.peak(), self.LIMIT)
            self.assertTrue(said(chat(serve.client(), QUESTION, max_tokens=4)))


class Stops(unittest.TestCase):
    FIRST = [{"role": "user", "content": "Tell me a long story about a lighthouse and its keeper. " * 3}]
    WORDS = {"max_tokens": 120, "extra_body": {"ignore_eos": True}}

    def conversation(self, client):
        first = chat(client, self.FIRST, max_tokens=50)
        return [*self.FIRST, {"role": "assistant", "content": said(first)}, {"role": "user", "content": "And then?"}]

    def test_an_answer_goes_on_after_a_restart(self):
        with Serve() as serve:
            messages = self.conversation(serve.client())
            wanted = said(chat(serve.client(), messages, **self.WORDS))
        with tempfile.TemporaryDirectory() as folder:
            store = ["--kv-store", os.path.join(folder, "store")]
            with Serve("--drain", "0", *store) as serve:
                client, text = serve.client(), ""
                self.assertEqual(self.conversation(client), messages)
                stream = iter(chat(client, messages, stream=True, **{**self.WORDS, "max_tokens": 4000}))
                with self.assertRaises(openai.APIError) as caught:
                    for nth, chunk in enumerate(stream):
                        text += chunk.choices[0].delta.content or ""
                        if nth == 8:
                            serve.signal()
                error = caught.exception
                self.assertEqual((error.code, error.type), ("service_unavailable", "server_error"))
                self.assertTrue(text and (wanted.startswith(text) or text.startswith(wanted)))
                self.assertEqual(serve.status(), 0, serve.log())
            # Where blocks begin elsewhere, sums go in another order: the words may be others.
            with Serve("--page-size", "64KiB", *store) as serve:
                self.assertTrue(said(chat(serve.client(), messages, **self.WORDS)))
                self.assertEqual(serve.metric("outcore_kv_blocks_restored_total"), 0)
                self.assertIn("delete what is not needed", serve.log())
            with Serve(*store) as serve:
                answer = chat(serve.client(), messages, **self.WORDS)
                self.assertEqual(said(answer), wanted)
                self.assertGreater(answer.usage.prompt_tokens_details.cached_tokens, 0)
                self.assertGreater(serve.metric("outcore_kv_blocks_restored_total"), 0)

    def test_while_it_drains_answers_end_and_none_begins(self):
        with Serve("--drain", "3600") as serve:
            client = serve.client()
            self.assertEqual(serve.get("/ready")[0], 200)
            stream = iter(chat(client, QUESTION, stream=True, max_tokens=200, extra_body={"ignore_eos": True}))
            next(stream)
            serve.signal()
            until(lambda: "stopping" in serve.log())
            # The answer may have ended by now, and the server with it.
            with contextlib.suppress(OSError):
                self.assertEqual(serve.get("/ready")[0], 503)
                self.assertEqual(serve.get("/health")[0], 200)
            with self.assertRaises((openai.InternalServerError, openai.APIConnectionError)):
                chat(client, QUESTION, max_tokens=4)
            self.assertEqual(pieces(stream)[1], "length")
            self.assertEqual(serve.status(), 0, serve.log())


HAS_BROWSER = unittest.skipUnless(
    browser.find() or "browser" in REQUIRED, "there is no Chromium (install it, or name one in OUTCORE_CHROMIUM)")


@HAS_BROWSER
class InABrowser(OfOneServer):
    # Its conversations are shorter than the blocks of larger pages.
    options = ["--page-size", "512KiB"]
    NOTES = "document.querySelectorAll('.turn.assistant .note').length"
    TEXT = "[...document.querySelectorAll('.turn.assistant .text')].at(-1).textContent"

    def setUp(self):
        self.page = browser.Page(browser.find(), 1280, 860)
        self.addCleanup(self.page.__exit__)
        self.page.open(f"{self.serve.url}/")
        self.page.until("document.querySelector('#model').textContent")
        self.page.press("#settings summary")
        self.settings(0, 40)

    def settings(self, temperature, most):
        self.page.type("#temperature", str(temperature))
        self.page.type("#most", str(most))

    def ask(self, question):
        self.page.type("#question", question)
        self.page.press("#send")

    def colour(self, name):
        return self.page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")

    def test_a_conversation_and_the_map(self):
        messages = []
        for turn, question in enumerate((QUESTION, "And what is a <b>page</b>?")):
            self.page.type("#question", question)
            self.page.enter()
            self.page.until(f"{self.NOTES} === {turn + 1}")
            messages.append({"role": "user", "content": question})
            text = self.page.evaluate(self.TEXT)
            self.assertEqual(text, said(chat(self.client, messages, max_tokens=40)))
            messages.append({"role": "assistant", "content": text})
        self.assertEqual(self.page.evaluate("document.querySelectorAll('#log b').length"), 0)
        self.assertGreater(float(self.page.evaluate("document.querySelector('#rate').textContent")), 0)
        self.assertGreater(int(self.page.evaluate("document.querySelector('#cached').textContent")), 0)
        # Each tier that has pages has its colour in the map, and its counts are those of the server when all is quiet.
        self.page.until("document.querySelectorAll('.legend .size').length === 6")
        served = {entry["class"]: entry["pages"] for entry in json.loads(self.serve.get("/pages")[1])["classes"]}
        for kind, pages in served.items():
            self.page.until(f"document.querySelector('#{kind}').getAttribute('aria-label')"
                            f".startsWith('device memory: {pages.count('d'):,} pages')")
            drawn = self.page.colours(f"#{kind}")
            for name, letter in (("device", "d"), ("disk", "s")):
                if letter in pages:
                    self.assertGreater(drawn.get(self.colour(name), 0), 0, (kind, name, drawn))
        self.page.screenshot(os.path.join(TARGET, "clients", "page.png"))
        self.page.resize(400, 900)
        self.assertLessEqual(self.page.evaluate("document.documentElement.scrollWidth"), 400)
        self.page.screenshot(os.path.join(TARGET, "clients", "page-narrow.png"))
        self.assertEqual(self.page.complaints, [])

    def test_pages_that_come_are_seen_while_it_answers(self):
        self.settings(0, 4000)
        self.ask("Count to a thousand.")
        self.page.until("document.querySelector('#keys_and_values').getAttribute('aria-label')"
                        "?.match(/just come: [1-9]/)")
        until(lambda: self.page.colours("#keys_and_values").get(self.colour("fresh")))
        self.page.press("#clear")
        until(lambda: self.serve.metric("outcore_running_answers") == 0)
        self.assertEqual(self.page.evaluate("document.querySelectorAll('.turn').length"), 0)
        self.assertEqual(self.page.complaints, [])

    def test_stop_ends_the_answer_and_the_conversation_goes_on(self):
        self.settings(0, 4000)
        self.ask("Count to a thousand.")
        self.page.until(f"{self.TEXT}.length > 20")
        self.page.press("#stop")
        self.page.until(f"{self.NOTES} === 1")
        self.assertIn("Stopped.", self.page.evaluate("document.querySelector('.turn.assistant').textContent"))
        until(lambda: self.serve.metric("outcore_running_answers") == 0)
        self.assertTrue(self.page.evaluate("document.querySelector('#stop').disabled"))
        self.settings(0, 8)
        self.ask("Thank you.")
        self.page.until(f"{self.NOTES} === 2")
        self.assertTrue(self.page.evaluate(self.TEXT))
        self.assertEqual(self.page.complaints, [])

    def test_an_error_is_said_in_words(self):
        self.settings(3, 8)
        self.ask("Hello")
        self.page.until(f"{self.NOTES} === 1")
        self.assertIn("temperature", self.page.evaluate("document.querySelector('.wrong').textContent"))
        # What was not answered is no part of the conversation, and can be sent again.
        self.assertEqual(self.page.evaluate("document.querySelector('#question').value"), "Hello")
        self.settings(0, 8)
        self.page.press("#send")
        self.page.until(f"{self.NOTES} === 2")
        self.assertEqual(self.page.evaluate(self.TEXT), said(chat(self.client, "Hello", max_tokens=8)))
        # The browser itself logs the status 400, and nothing else.
        self.assertTrue(all("400" in complaint for complaint in self.page.complaints), self.page.complaints)


@HAS_BROWSER
class InABrowserWithAToken(unittest.TestCase):
    def test_the_token_is_asked_for_and_kept(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "token")
            with open(path, "w") as file:
                file.write("a-token-for-tests\n")
            with Serve("--token-file", path) as serve, browser.Page(browser.find(), 1280, 860) as page:
                page.open(f"{serve.url}/")
                page.until("document.querySelector('#reach').textContent.includes('Settings')")
                page.press("#settings summary")
                page.type("#token", "a-token-for-tests")
                page.evaluate("document.querySelector('#token').dispatchEvent(new Event('change'))")
                page.until("document.querySelector('#model').textContent")
                page.until("!document.querySelector('#reach').textContent")
                self.assertEqual(page.evaluate("sessionStorage.getItem('token')"), "a-token-for-tests")
                self.assertTrue(all("401" in complaint for complaint in page.complaints), page.complaints)


def main():
    if openai is None:
        if os.path.exists(PYTHON) and "OUTCORE_CLIENTS" not in os.environ:
            os.execve(PYTHON, [PYTHON, *sys.argv], {**os.environ, "OUTCORE_CLIENTS": "1"})
        sys.exit("test_clients: OpenAI's client is not there: run scripts/fetch_clients.sh")
    for path in (MODEL, os.environ.get("SERVE", os.path.join(TARGET, "debug", "serve"))):
        if not os.path.exists(path):
            sys.exit(f"test_clients: {path} is not there: scripts/test.sh clients makes it")
    unittest.main(verbosity=2)


if __name__ == "__main__":
    main()
