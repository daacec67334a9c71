"""The tokeniser of this directory's models: one token a byte."""


def byte_tokens() -> list[str]:
    """Return the 256 byte tokens in the spelling of GPT-2 tokenisers; token ``b`` stands for byte ``b``.

    Printable bytes of Latin-1 stand for themselves and the others, in order, for the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    other = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(other)) for byte in range(256)]
