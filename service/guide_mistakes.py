"""What is wrong with a guide, for whoever wrote it: which kind of mistake, and where.

`guide_compiler` calls it with what llguidance says, which repeats much of what it was given. Each word that comes out
is from the lists in here, and each number is a place: what a client wrote gets into no answer and no log.
"""

import re

from service.guide_grammars import is_gbnf
from service.guides import Guide, GuideKind

_KEYWORDS = (
    r"\$anchor|\$defs|\$dynamicAnchor|\$dynamicRef|\$id|\$recursiveAnchor|\$recursiveRef|\$ref|\$schema|"
    r"additionalItems|additionalProperties|allOf|anyOf|const|contains|contentEncoding|contentMediaType|"
    r"contentSchema|definitions|dependencies|dependentRequired|dependentSchemas|else|enum|"
    r"exclusiveMaximum|exclusiveMinimum|format|if|items|maxContains|maxItems|maxLength|maxProperties|"
    r"maximum|minContains|minItems|minLength|minProperties|minimum|multipleOf|not|oneOf|pattern|"
    r"patternProperties|prefixItems|properties|propertyNames|required|then|type|unevaluatedItems|"
    r"unevaluatedProperties|uniqueItems"
)
"""Of all drafts of JSON Schema."""

_OF_EXPRESSIONS = frozenset(
    {
        "backreferences are not supported",
        "dangling flag negation operator",
        "decimal literal invalid",
        "duplicate capture group name",
        "duplicate flag",
        "empty capture group name",
        "expected flag but got end of regex",
        "flag negation operator repeated",
        "hexadecimal literal empty",
        "hexadecimal literal is not a Unicode scalar value",
        "incomplete escape sequence, reached end of pattern prematurely",
        "invalid Unicode character class",
        "invalid capture group character",
        "invalid character class range, the start must be <= the end",
        "invalid escape sequence found in character class",
        "invalid hexadecimal digit",
        "invalid range boundary, must be a literal",
        "invalid repetition count range, the start must be <= the end",
        "look-around, including look-ahead and look-behind, is not supported",
        "pattern can match invalid UTF-8",
        "repetition operator missing expression",
        "repetition quantifier expects a valid decimal",
        "unclosed capture group name",
        "unclosed character class",
        "unclosed counted repetition",
        "unclosed group",
        "Unicode not allowed here",
        "Unicode property not found",
        "Unicode property value not found",
        "unopened group",
        "unrecognized escape sequence",
        "unrecognized flag",
    }
)
"""As the regex crate says them."""

_TOO_MUCH = (
    r"(?:lexer|parser) error: |Parser Error: (?!token )|.*(?:[Tt]oo (?:many|big|large|complex)|fuel|limit)"
)
_KINDS = (
    # Of JSON schemas.
    (rf"(?:Expected [\w ]+ for ')?({_KEYWORDS})(?:'| must be)", "{}: a value of the wrong type"),
    (r"Invalid type: ", "type: one of null, boolean, integer, number, string, array and object"),
    (r"schema must be an object or boolean", "a schema must be an object or a boolean"),
    (r"oneOf constraints", "oneOf: not where its alternatives may overlap, or it cannot be told; anyOf is"),
    (r"min/maxProperties", "minProperties, maxProperties: only where all properties are required"),
    (r"patternProperty regexes", "patternProperties: must not overlap"),
    (r"invalid multiple of|Value for 'multipleOf'", "multipleOf: must be above 0"),
    (
        r"Resource |Pointer |Invalid URI|Reference |Anchor |Unknown specification",
        "$ref, $id or $schema: leads to no place in the schema",
    ),
    (r"Failed to generate regex", "minimum, maximum: numbers beyond all measure"),
    (r"unknown field", "x-guidance: holds what is not known"),
    (
        rf"Unsatisfiable schema: ({_KEYWORDS}) \(.*\) is (?:greater than|equal to) ({_KEYWORDS}) ",
        "nothing matches it: {} leaves nothing for {}",
    ),
    (r"Unsatisfiable schema: \w+ is empty", "nothing matches it: there are no alternatives"),
    (r"Unsatisfiable schema: required property", "nothing matches it: required has what cannot be"),
    (r"Unsatisfiable schema|NoExtensionBias", "nothing matches it"),
    (r".*hex escape|.*surrogate", "an escape of half a character"),
    # Of grammars.
    (r"unknown name|rule .* not found", "a name that is not defined"),
    (r"duplicate ", "a name that is defined twice"),
    (r"circular reference", "a terminal that needs itself"),
    (r"unknown special token|.*[Tt]oken range", "a special token that the model does not have"),
    (r"invalid range order|range (?:end|start) must be >", "a range that ends before it begins"),
    (r"range (?:start|end) must be a single", "a range that is not between two characters"),
    (r"Unknown common regex", "an import that is not known"),
    (r"unknown grammar", "a grammar that is not known"),
    (r"failed to parse", "%json or %regex: what follows is not right"),
    (r"no start rule|Empty grammar", "has no rule named start"),
    (r"lexer error$", "a string or an expression without its end, or a character that means nothing"),
    (r"Expected token ('[^\w\s']{1,2}')", "expected {}"),
    (r"(?:at EOF: )?(?:Expected|[Ee]xpecting|Unexpected|Unknown attribute)", "unexpected here"),
    (r".*(?:not supported|cannot be used|not parametric)", "not supported here"),
    # Of all.
    (
        r"Parser Error: Current row",
        "too much may follow at one place, of optional properties or of alternatives",
    ),
    (_TOO_MUCH, "needs more work or memory than is allowed"),
    (r"Parser Error: ", "nothing follows that the model has tokens for"),
)


def mistake(said: str, guide: Guide | None = None) -> str:
    """In one line of at most 200 characters. said: by llguidance. guide: what it was given, None for a guide on the
    way."""
    where, said = _where(said, guide)
    if (found := re.match(r"failed to compile JSON schema: ", said)) is not None:
        return f"{where}%json: {mistake(said[found.end() :])}"
    if (found := re.match(r"Unimplemented keys: (.*)", said)) is not None:
        named = sorted(set(re.findall(rf'"({_KEYWORDS})"', found[1])))
        return f"{where}not supported: {', '.join(named[:6]) or 'a keyword'}"
    if "regex parse error" in said or "lookarounds not supported" in said:
        in_schema = guide is not None and guide.kind is GuideKind.JSON_SCHEMA
        return f"{where}{'pattern: ' if in_schema else ''}{_of_expression(said, guide)}"
    line = said.partition("\n")[0]
    for kind, text in _KINDS:
        if (found := re.match(kind, line)) is not None:
            return where + text.format(*found.groups())
    return f"{where}cannot be followed"


def _where(said: str, guide: Guide | None) -> tuple[str, str]:
    """The place in a grammar, and the rest. GBNF and expressions were put into Lark by us: there it is none of the
    client's."""
    found = re.match(r"(?:at )?(\d+)\((\d+)\): ", said)
    if found is None:
        return "", said
    own = guide is not None and guide.kind is GuideKind.GRAMMAR and not is_gbnf(guide.text)
    return f"line {found[1]}, column {found[2]}: " if own else "", said[found.end() :]


def _of_expression(said: str, guide: Guide | None) -> str:
    if "regex parse error" not in said:
        return "word boundaries, anchors of lines and look-around are not supported"
    lines = re.findall(r"^error: (.*)$", said, re.MULTILINE)
    kind = next((line for line in reversed(lines) if line in _OF_EXPRESSIONS), "is not an expression")
    marked = re.search(r"regex parse error:\n    .*\n    ( *)\^", said)
    if marked is None:
        return kind
    column = len(marked[1])
    if guide is not None and guide.kind is GuideKind.REGEX:
        column = _written(guide.text, column)
    return f"{kind} (at character {column + 1} of the expression)"


def _written(text: str, shown: int) -> int:
    """Which character of an expression it is. shown: where llguidance shows it, with some characters escaped."""
    at = 0
    for part in re.finditer(r"\\.|.", text, re.DOTALL):
        width = 2 if len(part[0]) == 2 or part[0] in "\n\r\t/" else 1
        if at + width > shown:
            return part.start() + min(shown - at, len(part[0]) - 1)
        at += width
    return len(text)
