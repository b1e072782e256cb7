#!/usr/bin/env python3
"""Writes the ids that llama.cpp gives texts: the fixtures that examples/llm/tests/ids.rs compares ours with.

    ids.py FOLDER [RANDOM]

Run it with the Python of scripts/fetch_peers.sh. Into FOLDER go smollm2.json (the model of scripts/fetch_model.sh) and,
for vocabularies made up here, words.gguf with words.json (byte-level BPE under every pre-processing we know; the file
names the last) and spm.gguf with spm.json. RANDOM is the number of random texts beside the fixed ones; the fixtures in
the tree have 40.
"""

import collections
import json
import random
import struct
import sys
from importlib.metadata import version
from pathlib import Path

import llama_cpp
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
PRES = """smollm starcoder refact command-r codeshell exaone minerva-7b mellum2 gpt-2 phi-2 mpt olmo jais gigachat
    a.x-4.0 mellum exaone4 trillion granite-docling llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2
    smaug-bpe dbrx minicpm5 glm4 chatglm-bpe qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open
    qwen35 seed-coder tekken gpt-4o llama4 kanana2 deepseek-llm deepseek-coder deepseek-v3 hunyuan-dense
    falcon default""".split()
WHOLE = "a whole text"
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_", "<tool>", "<tool><tool>", "   ", "\n\n\n"]

TEXTS = [
    "", " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n", "\n ", "\t\t\n \n  x", "a", " a", "  a", "a ", "a  ", "a\n", "\r",
    "Hello, world!", " Hello", "  Hello   world  ", "Hello\tworld\t", "line one\r\nline two\r\n\r\nline three",
    "I'm you're he'll we've they'd it's can't I'M YOU'RE HE'LL WE'VE THEY'D IT'S 'tis 'S 's's ''s", "don\u2019t it\u2019s",
    "1", "12", "123", "1234", "12345678901234567890", "3.14159 1,000,000 1e-9 0x7fff 10\u00b2 \u00bd \u2167 \u0663\u0664\u0665 \uff11\uff12\uff13 \u4e09",
    "fn main() {\n    let x: Vec<u8> = vec![0; 1 << 20];\n\tprintln!(\"{x:?}\"); // end\n}\n",
    "def f(a, *b, **c):\n    return {k: v for k, v in c.items() if k != '_'}\n\n\n", "a_b-c.d/e\\f|g&h^i%j$k#l@m!n~o`p",
    "<p class=\"x\">&amp;</p><!-- -->", "https://example.org/a?b=c&d=%20#e", "user@example.org", "$ ls -la | grep '\\.rs$' >> out",
    "caf\u00e9 cafe\u0301 na\u00efve A\u030a \u1e69 s\u0323\u0307 Zalgo\u0335\u0321\u034e\u0347", "Stra\u00dfe \u0130stanbul \u0131 \u01c5 \u02b0 \u00aa",
    "\u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439, \u043c\u0438\u0440! \u0423\u0447\u0451\u043d\u044b\u0439 \u2116 5",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u3000\u4e2d\u6587\u6e2c\u8a66\u3002", "\u3053\u3093\u306b\u3061\u306f\u4e16\u754c\u3002\u30ab\u30bf\u30ab\u30ca\u30fc \uff8a\uff9d\uff76\uff78",
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4 \u314b\u314b\u314b", "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645\u060c \u0643\u064a\u0641\u061f", "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e \u0967\u0968\u0969", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01", "\u1797\u17b6\u179f\u17b6\u1781\u17d2\u1798\u17c2\u179a", "\u10d2\u10d0\u10db\u10d0\u10e0\u10ef\u10dd\u10d1\u10d0 \u1c92",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd \u2764\ufe0f \u263a", "x\u200by\u200dz\u2060w\ufeffv\u00adu",
    "\u00a0\u2002\u2003\u2009\u202f\u205f\u3000x\u1680y\u2028z\u2029\u0085w", " \u00a0 x \u3000\u3000y", "\u3000\u3000", "\x00\x01\x02\x1b[31mred\x1b[0m\x7f\x0b\x0c\x1c\x1d\x1e\x1f",
    "\ufffd\ufffd \ue000 \uf8ff \U000f0000 \U0010ffff \ufdd0 \uffff", "\u2200x\u2208\u211d: \u2308x\u2309 \u2265 \u222b\u2080\u00b9 \u221a2 \u2260 \u00b1\u20ac\u00a3\u00a5", "\U0001d4d7\U0001d4ee\U0001d4f5\U0001d4f5\U0001d4f8 \U00010400\U00010428 \U0001e900",
    "\u201cquoted\u201d \u2018single\u2019 \u2014 dash \u2013 \u2026 \u00ab\u00bb \u203d", "!!!???...,,,;;;:::---___===+++***///\\\\\\", "a,b;c:d.e!f?g", "...\n\n...\r\n!\n", " .\n .\r\n\r\n .",
    "x" * 600, "ab" * 150, " " * 40 + "x", "\n" * 30 + "x", "\t" * 17, " \t" * 9 + "\n", "-" * 77, "9" * 100, "\u4e2d" * 50, "\u4e2d\u3000" * 12, "\U0001f600" * 12,
    "antidisestablishmentarianism floccinaucinihilipilification", "camelCaseHTTPServer XMLHttpRequest snake_CASE ABCdef GHi", "L'\u00e9t\u00e9 d'\u00c9ric S'IL l'OEUF",
    "<s>", "</s>", "<s>x</s>", "a <s> b", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "<|im_start|> x", "<|im_start |>", "<|im_start|", "<|endoftext|>a<|endoftext|>", "<|im_start|><|im_start|><|im_end|>", "<tool>x<tool><tool>y", "<|im_<|im_start|>", "<<|im_end|>>", "<repo_name>a<file_sep>b<filename>c<gh_stars>", "<unk><pad><0x41>", "a   b    c     d\n\n\ne\n\n\n\nf",
]  # fmt: skip


def texts(extra):
    """The fixed texts, and `extra` random ones of mixed alphabets."""
    draw = random.Random(20240607)
    plain = "".join(TEXTS)
    words = plain.split()
    every = [c for c in range(1, 0x110000) if not 0xD800 <= c < 0xE000]
    kinds = [
        lambda: draw.choice(words),
        lambda: draw.choice([" ", "  ", "\n", "\t", "\r\n", " \n", "\u3000", "\u00a0"]),
        lambda: draw.choice("'.,!?-_/\\\"()[]{}<>=+*&^%$#@~`|;:0123456789"),
        lambda: chr(draw.choice(every)),
        lambda: chr(draw.randrange(0x80, 0x3100)),
        lambda: chr(draw.randrange(1, 0x80)),
        lambda: draw.choice(plain),
        lambda: draw.choice(SPECIALS),
        lambda: draw.choice("aeioustnrl") * draw.randrange(1, 9),
    ]
    made = []
    while len(made) < extra:
        weights = [draw.random() ** 3 for _ in kinds]
        made.append("".join(part() for part in draw.choices(kinds, weights, k=draw.randrange(1, 40))))
    return TEXTS + made


def gguf(path, metadata):
    """A file of metadata alone; lists are of texts, integers or floats, like their first element."""
    text = lambda s: struct.pack("<Q", len(s.encode())) + s.encode()
    kinds = {bool: (7, lambda v: struct.pack("<?", v)), int: (4, lambda v: struct.pack("<I", v)), str: (8, text)}
    items = {int: (5, lambda v: struct.pack("<i", v)), float: (6, lambda v: struct.pack("<f", v)), str: (8, text)}
    out = b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata))
    for key, value in metadata.items():
        if isinstance(value, list):
            kind, write = items[type(value[0])]
            value = struct.pack("<IIQ", 9, kind, len(value)) + b"".join(map(write, value))
        else:
            kind, write = kinds[type(value)]
            value = struct.pack("<I", kind) + write(value)
        out += text(key) + value
    path.write_bytes(out)


def frequent_pairs(sequences, count):
    """Merges by frequency. They may cross words, so the ids show where pre-processing cuts a text."""
    merges = []
    for _ in range(count):
        found = collections.Counter(pair for s in sequences for pair in zip(s, s[1:]))
        pair, times = max(found.items(), key=lambda item: (item[1], item[0]), default=(None, 0))
        if times < 2:
            break
        merges.append(pair)
        for at, s in enumerate(sequences):
            joined, i = [], 0
            while i < len(s):
                both = tuple(s[i : i + 2]) == pair
                joined.append(s[i] + s[i + 1] if both else s[i])
                i += 1 + both
            sequences[at] = joined
    return merges


def common(model, tokens, kinds):
    key = "tokenizer.ggml."
    sizes = {"context_length": 64, "embedding_length": 64, "block_count": 1, "feed_forward_length": 64, "attention.head_count": 1}
    return {
        "general.architecture": "llama",
        "general.name": "made up",
        **{f"llama.{name}": size for name, size in sizes.items()},
        key + "model": model,
        key + "tokens": tokens,
        key + "token_type": kinds,
    }


def byte_level(path, pre):
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in printable}
    letters |= {b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in printable)}
    # Without a few bytes, to see what becomes of them.
    spoken = [letters[b] for b in range(256) if b not in (0x01, 0x7F, 0xF5)]
    sequences = [[letters[b] for b in text.encode()] for text in TEXTS]
    merges = frequent_pairs(sequences, 700)
    joined = list(dict.fromkeys(a + b for a, b in merges))
    tokens = spoken + [t for t in joined if t not in spoken and t not in SPECIALS]
    kinds = [1] * len(tokens) + [3] * 4 + [4] * (len(SPECIALS) - 4)
    metadata = common("gpt2", tokens + SPECIALS, kinds)
    metadata |= {"tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges], "tokenizer.ggml.pre": pre}
    metadata |= {"tokenizer.ggml.bos_token_id": len(tokens), "tokenizer.ggml.eos_token_id": len(tokens) + 1}
    gguf(path, metadata)


def spm(path):
    sequences = [list(text.replace(" ", "\u2581")) for text in TEXTS]
    letters = sorted({c for s in sequences for c in s if s.count(c) > 1 and c not in "\n\t"})
    joined = [a + b for a, b in frequent_pairs(sequences, 500)]
    made = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *SPECIALS[2:]]
    kinds = [2, 3, 3, *[6] * 256, 3, 3, *[4] * (len(SPECIALS) - 4)]
    pieces = list(dict.fromkeys(p for p in joined + letters if p not in made))
    scores = [0.0] * len(made) + [-float(n) for n in range(len(pieces))]
    metadata = common("llama", made + pieces, kinds + [1] * len(pieces))
    metadata |= {"tokenizer.ggml.scores": scores, "tokenizer.ggml.add_eos_token": True}
    gguf(path, metadata)


def ids(path, wanted):
    """The ids of each text as part of a text, and of a whole one."""
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    part = [model.tokenize(text.encode(), add_bos=False, special=True) for text in wanted]
    return {"ids": part, "whole": model.tokenize(WHOLE.encode(), add_bos=True, special=True)}


def chats(path):
    """Conversations, the prompts that the model's own template makes of them, and their ids."""
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    names = [model._model.token_get_text(token) for token in (model.token_eos(), model.token_bos())]
    template = Jinja2ChatFormatter(model.metadata["tokenizer.chat_template"], *names)
    found = []
    for text in ["Hello", "  spaced \n\n", "<|im_end|>x {{ 7 * 7 }} {% if %}", "", "\u65e5\u672c\u8a9e\t\r\n", "It's <b>1 & 2</b>"]:
        for before in [[], [["system", "Be brief."]], [["user", "a"], ["assistant", "b\n"]]]:
            turns = [*before, ["user", text]]
            prompt = template(messages=[{"role": role, "content": content} for role, content in turns]).prompt
            found.append([turns, prompt, model.tokenize(prompt.encode(), add_bos=True, special=True)])
    return found


def write(path, model, wanted, groups, **more):
    head = {
        "made_by": f"benches/compare/ids.py with llama-cpp-python {version('llama-cpp-python')}",
        "model": model,
        "whole": WHOLE,
        "texts": wanted,
        "groups": groups,
        **more,
    }
    text = json.dumps(head, separators=(",", ":")).replace("],[", "],\n[").replace('","', '",\n"')
    assert json.loads(text) == head
    path.write_text(text + "\n")


def main(folder, extra=40):
    folder = Path(folder)
    wanted = texts(int(extra))
    write(folder / "smollm2.json", MODEL.name, wanted, [ids(MODEL, wanted)], chats=chats(MODEL))
    spm(folder / "spm.gguf")
    write(folder / "spm.json", "spm.gguf", wanted, [ids(folder / "spm.gguf", wanted)])
    wanted = wanted if len(wanted) > 1000 else TEXTS
    words, groups = folder / "words.gguf", {}
    for pre in PRES:
        byte_level(words, pre)
        groups.setdefault(json.dumps(ids(words, wanted)), []).append(pre)
    write(folder / "words.json", words.name, wanted, [{"pre": pres, **json.loads(found)} for found, pres in groups.items()])


if __name__ == "__main__":
    main(*sys.argv[1:])
