"""Text to compare tokenizers on: over 2,000 lines, partly written, partly drawn, always the same.

Fifteen scripts, code in eight languages, emoji with joiners, flags and skin tones, digits, runs of whitespace,
combining marks in and out of NFC, control characters, special tokens spelled out.
"""

from __future__ import annotations

import random

# One sentence or two for each script; words and characters are drawn from them as well.
SCRIPTS = {
    "latin": "The quick brown fox jumps over the lazy dog, doesn't it? Zwölf Boxkämpfer jagen Viktor quer über Sylt.",
    "latin with marks": "Příliš žluťoučký kůň úpěl ďábelské ódy. Tiếng Việt có sáu thanh điệu. İstanbul'da ışık söndü.",
    "greek": "Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία. Η γρήγορη αλεπού πηδάει πάνω από τον σκύλο.",
    "cyrillic": "Съешь же ещё этих мягких французских булок, да выпей чаю. Їжак і ґава, ўсё ў парадку.",
    "hebrew": "דג סקרן שט בים מאוכזב ולפתע מצא לו חברה. בְּרֵאשִׁית בָּרָא",
    "arabic": "نص حكيم له سر قاطع وذو شأن عظيم، مكتوب على ثوب أخضر. ٠١٢٣٤٥٦٧٨٩ بِسْمِ",
    "devanagari": "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश। ०१२३४५६७८९",
    "tamil": "யாமறிந்த மொழிகளிலே தமிழ்மொழி போல் இனிதாவது எங்கும் காணோம்.",
    "thai": "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน",
    "han": "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。今天天气很好，我们去公园散步吧！",
    "japanese": "いろはにほへと ちりぬるを。カタカナとひらがな、漢字が混ざった文章です。ﾊﾝｶｸ",
    "korean": "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "georgian": "ჩვენ გვაქვს ძალიან ლამაზი ქვეყანა და კარგი ღვინო.",
    "armenian": "Բել դղյակի ձախ ժամն օֆ ազգությանը ցպահանջ չճշտած վնաս էր եւ փառք։",
    "ethiopic": "ሰላም ለዓለም፤ ያለው ማማሩ የሌለው መናገሩ።",
    "rare": "𐌰𐌱𐌲 𓀀𓁐 𒀀𒁀 ᚠᚢᚦ ᐊᐃᐅ 𝔄𝔅𝔇 𝕬𝖇𝖈 ⠓⠑⠇⠇⠕ 🜁🜂",
}

CODE = [
    'def f(xs: list[int], *, key=None) -> dict:\n    return {f"{x!r:>{8}}": x ** 2 for x in xs if x % 2 == 0}\n',
    "    try:\n        ...\n    except KeyError as error:  # noqa\n        raise SystemExit(1) from error\n",
    "#include <cstdio>\ntemplate <typename T>\nT sum(const T& x) { T s{}; for (auto v : x) s += v; return s; }\n",
    'int main(void)\n{\n\tint *p = &(int){0x7fffffff};\n\tprintf("%d\\n", *p);\n\treturn 0;\n}\n',
    'fn main() -> Result<(), E> {\n    let v: Vec<u8> = (0..=255).collect();\n    println!("{v:?}"); Ok(())\n}\n',
    "const f = async ({ a, b = 1 }) => (await fetch(`/api/${a}?b=${b}`)).json() ?? null; // => {}\n",
    "SELECT u.id, COUNT(*) AS n FROM users u LEFT JOIN posts p ON p.uid = u.id WHERE u.name LIKE '%\\_x' GROUP BY 1;\n",
    "for f in *.txt; do awk -F'\\t' '{ print $1 | \"sort -u\" }' \"$f\" 2>/dev/null || exit $?; done\n",
    "<!DOCTYPE html>\n<a href=\"https://example.org/?q=1&amp;r=%20#x\" class='b c'>&nbsp;&lt;x&gt;</a>\n",
    '{"name": "\\u00e9", "values": [1, -2.5e-10, null, true], "nested": {"a": {"b": [[]]}}}\n',
    "\\begin{equation} \\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2} \\end{equation}\n",
    'main :: IO ()\nmain = mapM_ (\\x -> putStrLn $ show x ++ "\\t") [1 ..]\n',
    "| a | b |\n|---|:-:|\n| 1 | **2** |\n\n- [ ] todo\n  * nested `code`\n\n```sh\n$ ls -la\n```\n",
]

EMOJI = [
    "😀", "😂", "🥲", "🙂", "❤️", "❤️‍🔥", "👍", "👍🏻", "👍🏽",
    "👍🏿", "👩‍👩‍👧‍👦", "👨🏾‍🚀", "🧑🏻‍🤝‍🧑🏿", "🏳️‍🌈", "🏴‍☠️", "🇩🇪", "🇯🇵", "🇧🇷",
    "🇺🇳", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "1️⃣", "#️⃣", "☎︎", "☎️", "✌🏽", "🫠", "🪿",
    "🐈‍⬛", "🐻‍❄️", "👁️‍🗨️", "♀️", "⚧️", "🀄", "🃏",
]  # fmt: skip

WHITESPACE = [
    "\t",
    "\n",
    "\r\n",
    "\r",
    "\u00a0",
    "\u2003",
    "\u3000",
    "\u200b",
    "\u2028",
    "\u0085",
    "\v",
    "\f",
    *" " * 12,
]

COMBINING = [
    "e\u0301", "\u00e9", "A\u030a", "\u212b", "\u1112\u1161\u11ab", "\ud55c", "\ufb01", "q\u0323\u0307",
    "q\u0307\u0323",
    "\u0301", "a\u0300\u0301\u0302\u0303", "\u0958", "\u0915\u093c", "\u1e9b\u0323", "\u2126", "\u0344",
    "\uac00\u11a8", "\u1fef",
]  # fmt: skip

ODD = [
    "\x00",
    "\x01",
    "\x1b[0m",
    "\x7f",
    "\ufeff",
    "\ufffd",
    "\ufffe",
    "\u202e",
    "\u2066",
    "\ue000",
    "\U0010fffd",
    "\u00ad",
]

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<unk>", "[INST]", "[/INST]", "<think>", "</think>",
    "<tool_call>", "<|fim_prefix|>", "[TOOL_CALLS]", "[control_12]", "[REFERENCE_DOC_3]", "<0x0A>", "<0xE2>", "▁", "▁▁",
    "Ġ", "Ċ", "<|im_end|", "|im_start|>", "< s>", "[ INST ]", "<|IM_END|>", "<|", "|>", "[INST", "<<SYS>>",
]  # fmt: skip

WRITTEN = [
    "", " ", "  ", "   ", "\n", "\n\n", "\t", " \n", "\r\n\r\n", " a", "  a", "   a", "a ", "a  ", "a   ", "\ta", "\na",
    "Hello world, 2026!", "I'm we've you'd they'll it's DON'T 'Tis 'S ’s", "x" * 200, "ab" * 150, " " * 100, "=" * 90,
    "-" * 33 + ">" * 17, "\n" * 40, "\t" * 25, "a" * 31 + " " * 31 + "a" * 31, "🙂" * 20, "你" * 40, "é" * 40,
    "0", "00", "000", "0000", "1234567890" * 4, "3.14159 1,234,567.89 1e-10 0xDEADBEEF 0b1010 1_000 ½ ² Ⅷ ①",
    "2026-01-31T23:59:59.999Z 192.168.0.1 ::1 +49 (0)30 123-456 $1,000.00 €9,99 50% 1st 2nd",
    "camelCase PascalCase snake_case SCREAMING_CASE kebab-case dot.case path/to/file C:\\dir\\file",
    "a\u0301 \u00e1 \u0061\u0301\u0061\u0301", "mixedالعربيةand漢字andКириллица🙂",
    "words   with    several     spaces",
]  # fmt: skip

_LINES = 2400


def corpus() -> list[str]:
    """The lines (some hold line breaks), each once; among them `WRITTEN`, `CODE` and all of `SCRIPTS`."""
    generator = random.Random(20260207)
    lines = dict.fromkeys([*WRITTEN, *CODE, *SCRIPTS.values(), *EMOJI, *COMBINING, *ODD, *SPECIAL])
    for piece in SPECIAL:
        lines |= dict.fromkeys(
            [f"a {piece} b", f"a{piece}b", f"{piece}a", f" {piece} ", f"{piece}{piece}", f"x{piece}\n"]
        )
    while len(lines) < _LINES:
        lines[_drawn(generator)] = None
    return list(lines)


def _drawn(generator: random.Random) -> str:
    scripts = list(SCRIPTS.values())
    letters = "".join(scripts)
    kind = generator.randrange(8)
    if kind == 0:  # words of one script
        return " ".join(generator.choices(generator.choice(scripts).split(), k=generator.randint(2, 15)))
    if kind == 1:  # characters of one script, in no order
        return "".join(generator.choices(generator.choice(scripts), k=generator.randint(1, 60)))
    if kind == 2:  # characters of all scripts
        return "".join(generator.choices(letters, k=generator.randint(1, 40)))
    if kind == 3:  # a piece of code, indented
        code = generator.choice(CODE)
        start = generator.randrange(len(code))
        return " " * generator.randint(0, 20) + code[start : start + generator.randint(5, 80)]
    if kind == 4:  # numbers
        digits = generator.choice(["0123456789", "01", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "0123456789.,-+e "])
        return "".join(generator.choices(digits, k=generator.randint(1, 30)))
    if kind == 5:  # one character many times, inside words
        run = generator.choice([*" \n\t=-_.aé你🙂#*", *WHITESPACE]) * generator.randint(1, 40)
        return generator.choice(["", "x", "The", " "]) + run + generator.choice(["", "y", " end", "\n"])
    # everything at once, with special tokens now and then
    pools = [EMOJI, WHITESPACE, COMBINING, ODD, list(letters), letters.split(), list("{}[]()<>/\\|'\"`~!@#$%^&*;:,.?")]
    parts = [generator.choice(generator.choice(pools)) for _ in range(generator.randint(2, 25))]
    if kind == 7:
        parts.insert(generator.randrange(len(parts) + 1), generator.choice(SPECIAL))
    return "".join(parts)
