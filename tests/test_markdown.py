"""Names are shown in Markdown and YAML as they are."""

import json

import pytest
from markdown_it import MarkdownIt

from relattn.markdown import escape_markdown, markdown_table, quote_yaml

NAMES = [
    "digits",
    "fashion_mnist",
    "T-shirt/top",
    "3.5",
    "1. first",
    "2) second",
    "- item",
    "+ item",
    "# title",
    "> quote",
    "=== line",
    "--- line",
    "~~~ code",
    "*emphasis*",
    "_emphasis_",
    "__strong__",
    "a _b_ c",
    "`code`",
    "```code",
    "[link](https://a.org)",
    "![image](a.png)",
    "[link][a]",
    "[a]: https://a.org",
    "<b>bold</b>",
    "<script>alert(1)</script>",
    "<!-- comment -->",
    "&amp; &#65; &lt;",
    "cost $5 or $6",
    r"$\frac$",
    "a | b",
    "~~gone~~",
    "~gone~",
    "back\\slash \\* \\",
    "größe 日本語",
]


def shown(markdown):
    """The text that a reader sees, by an implementation of CommonMark."""
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    kinds, texts = set(), []
    for token in parser.parse(markdown):
        kinds.add(token.type)
        for child in token.children or []:
            kinds.add(child.type)
            texts.append(child.content)
    return "".join(texts), kinds


@pytest.mark.parametrize("name", NAMES)
def test_name_is_shown_as_it_is(name):
    text, kinds = shown(escape_markdown(name))
    assert text == name
    assert kinds <= {"paragraph_open", "inline", "paragraph_close", "text"} | {
        "text_special"
    }
    # GitHub shows mathematics between dollars, and strikes out between single tildes.
    for mark in "$~":
        assert mark not in escape_markdown(name).replace(f"\\{mark}", "")


@pytest.mark.parametrize("name", NAMES)
def test_name_stays_in_its_cell(name):
    table = markdown_table(["name", "value"], [[escape_markdown(name), "1"]])
    text, kinds = shown(table)
    assert text == f"namevalue{name}1"
    assert "td_open" in kinds


@pytest.mark.parametrize("name", ["a\nb", "a\r\n# b", "\x1b[31m", "\ud800", "\u202e"])
def test_characters_that_are_not_printed_are_escaped(name):
    text, _ = shown(escape_markdown(name))
    assert text.isprintable()
    assert text == name.encode("unicode_escape").decode()


@pytest.mark.parametrize("text", [*NAMES, "no", "null", "1e3", "a: b", "a\nb", "", "~"])
def test_yaml_is_a_quoted_string_or_a_word(text):
    quoted = quote_yaml(text)
    assert quoted == text and text[0].isalpha() or json.loads(quoted) == text
    assert len(quoted.splitlines()) == 1
