#!/usr/bin/env python3
"""The public surface of outcore, outcore-gpu and outcore-cuda, as text: public_api.py [--write] [FOLDER]

Reads what rustdoc wrote for outcore (FOLDER, by default target/doc/outcore) and, beside it, for the other two. Compares
it with docs/public-api.txt, so that the surface changes on purpose only. --write writes that file. Also checks that the
root of outcore has at most 30 names beside modules.
"""

import difflib
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTED = ROOT / "docs/public-api.txt"
ROOT_NAMES_MOST = 30
CRATES = ("outcore", "outcore_gpu", "outcore_cuda")
KINDS = {"struct", "enum", "trait", "fn", "type", "constant", "macro", "union", "static", "traitalias"}
# Elements that have no end tag.
EMPTY = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "wbr"}
# Traits that are implemented for one type, by hand or by `derive`. What follows from them (`Send`, blankets) is not
# listed.
OWN_TRAITS = "trait-implementations-list"


class Page(HTMLParser):
    """An item's declaration, its methods, and the traits that are implemented for it."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.declaration, self.methods, self.traits = [], [], []
        self.into = None

    def ids(self):
        return [mark for _, mark, _ in self.open]

    def handle_starttag(self, tag, attrs):
        if tag in EMPTY:
            return
        attrs = dict(attrs)
        mark, classes = attrs.get("id") or "", (attrs.get("class") or "").split()
        if self.into is None:
            if tag == "pre" and "item-decl" in classes:
                self.into = (self.declaration, len(self.open))
                self.declaration.append("")
            elif "code-header" in classes:
                if "implementations-list" in self.ids():
                    # Headings of `impl` blocks are `h3`; headings inside them are `h4`.
                    self.methods.append("")
                    self.into = (self.methods, len(self.open))
                elif OWN_TRAITS in self.ids() and tag == "h3":
                    self.traits.append("")
                    self.into = (self.traits, len(self.open))
        # Buttons that unfold a long declaration ("Show 23 fields") are no part of it.
        button = tag == "summary" and self.into is not None
        self.open.append((tag, mark, button or "tooltip" in classes))

    def handle_endtag(self, tag):
        if tag in EMPTY or not self.open:
            return
        self.open.pop()
        if self.into and len(self.open) <= self.into[1]:
            self.into = None

    def handle_data(self, data):
        if self.into and not any(skip for _, _, skip in self.open):
            self.into[0][-1] += data


def one_line(text):
    return " ".join(text.replace("\u24d8", "").replace("]pub ", "] pub ").split())


def exported_again(folder):
    """What a module takes from another public one, as `pub use` lines."""
    text = re.sub(r"<[^>]*>", "", (folder / "index.html").read_text(encoding="utf-8"))
    return [one_line(found) for found in re.findall(r"pub use [^;{]*;", text)]


def by_impl(methods):
    """Each `impl` once, with its methods: where they stand in the source makes no difference."""
    found, of = {}, []
    for text in map(one_line, methods):
        if re.match(r"(unsafe )?impl\b", text):
            of = found.setdefault(text, [])
        else:
            of.append(text)
    return [line for heading in sorted(found) for line in [heading, *sorted(found[heading])]]


def items(folder):
    """(path, kind, name, file) of every item."""
    for file in sorted(folder.rglob("*.html")):
        kind, _, rest = file.name.partition(".")
        name = rest.removesuffix(".html")
        if kind in KINDS and name and "." not in name:
            yield "::".join([folder.name, *file.relative_to(folder).parent.parts, name]), kind, file


def surface(folder):
    lines = []
    for index in sorted(folder.rglob("index.html")):
        module = "::".join([folder.name, *index.relative_to(folder).parent.parts])
        again = exported_again(index.parent)
        lines += [f"mod {module}"] if again else []
        lines += [f"    {line}" for line in again]
    for path, kind, file in items(folder):
        page = Page()
        page.feed(file.read_text(encoding="utf-8"))
        # An item of a private module has a page that only leads to the public one.
        if not page.declaration:
            continue
        lines.append(f"{kind} {path}")
        lines += [f"    {one_line(text)}" for text in page.declaration]
        if kind != "trait":
            lines += [f"    {text}" for text in by_impl(page.methods)]
            traits = (one_line(text) for text in page.traits)
            lines += sorted(f"    {text}" for text in traits if "StructuralPartialEq" not in text)
    return lines


def main():
    arguments = [text for text in sys.argv[1:] if text != "--write"]
    folder = Path(arguments[0]) if arguments else ROOT / "target/doc/outcore"
    folders = [folder.parent / name for name in CRATES]
    for each in folders:
        if not (each / "index.html").exists():
            sys.exit(f"public_api: {each} has no documentation: run cargo doc first, as scripts/lint.sh does")
    found = [line for each in folders for line in surface(each)]
    items_of_root = [line for line in found if re.fullmatch(r"[a-z]+ outcore::\w+", line)]
    root = [line.split()[1] for line in items_of_root if not line.startswith("mod")]
    root += exported_again(folder)
    if len(root) > ROOT_NAMES_MOST:
        sys.exit(f"public_api: the root has {len(root)} names, more than {ROOT_NAMES_MOST}: {', '.join(root)}")
    text = "\n".join(found) + "\n"
    if "--write" in sys.argv:
        LISTED.write_text(text, encoding="utf-8")
        return
    listed = LISTED.read_text(encoding="utf-8")
    if listed != text:
        names = ("docs/public-api.txt", "the documentation")
        sys.stdout.writelines(difflib.unified_diff(listed.splitlines(True), text.splitlines(True), *names, n=0))
        sys.exit("public_api: the public surface has changed; if it should, run scripts/public_api.py --write")


if __name__ == "__main__":
    main()
