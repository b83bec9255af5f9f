"""Texts that careless tokenizers lose or change."""

DIFFICULT_TEXTS = {
    "empty": "",
    "space": " ",
    "spaces": "  two  and   three   ",
    "emoji": "family 👩‍👩‍👧‍👦, flag 🇦🇶, skin 👍🏽",
    "combining": "e\u0301 versus é, Z\u0351\u036b\u0343algo",
    "line ends": "dos\r\nold mac\runix\n\n\n",
    "tabs": "\tindent\t\ttwice\v\f",
    "invisible": "zero\u200bwidth\u200d \ufeffbom \u202eright-to-left\u202c \u00a0nbsp \u00adsoft",
    "nul": "before\0after \x01\x1b[0m\x7f",
    "private": "\ue000 \U0010fffd \ufffd \ufffe",
    "scripts": "Привет мир 日本語の文章 العربية हिन्दी ١٢٣ ﬁ",
    "contractions": "I'm he'll THEY'RE it's 'twas 'S",
    "marks": "<|endoftext|></s><s><unk><pad><EOD>",
    "digits": "3.14159265358979 1e-308 0xDEADBEEF",
    "long word": "ab" * 20_000,
    "long run": " " * 5_000 + "\n" * 5_000,
}
