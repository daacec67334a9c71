"""Words of the report; page.js shows an entry as a tooltip wherever its word is used."""

from __future__ import annotations

from host.report.inputs import Inputs
from host.report.page import Html, Section, esc

TERMS = {
    "activation": "What a layer computes for a token and hands on: a vector of numbers. It changes with every "
    "token; weights do not.",
    "back-pressure": "A later stage has no room, so an earlier one waits.",
    "batch": "Tokens that pass a layer together, B of them; here usually one of each of B requests.",
    "block": "256 weights of Q6_K in 210 bytes, the smallest piece that can be decoded.",
    "drain": "Let a block pass unused: the tape moves all experts, and those that no token wants are drained.",
    "expert": "One of several feed-forward networks of a layer (here three matrices); a router picks a few "
    "for every token.",
    "golden model": "The arithmetic in NumPy, written from its definitions; hardware must equal it bit for bit.",
    "home": "Where a board's experts lie: behind a link from the host, or in a memory on the board.",
    "KV cache": "Keys and values of all tokens so far, which attention reads again for each new one; it grows "
    "with the context.",
    "lane": "Hardware that multiplies for one token: 16 multipliers. More lanes let more tokens share one "
    "pass over a block.",
    "ledger": "An account of every byte: what was asked for must equal what was read, sent and used.",
    "MAC": "Multiply and accumulate: one product added to a sum.",
    "mixture of experts": "A model whose layers have many experts and use a few of them for each token, so that most "
    "of its bytes are idle most of the time.",
    "pass": "One expert's blocks through the multipliers for one group of token lanes.",
    "payload share": "The part of a link's bytes that is weights; the rest is framing.",
    "Q6_K": "GGML's format of 6-bit weights: 210 bytes a block of 256, 6.5625 bits a weight.",
    "Q8_K": "llama.cpp's format of activations in a product with Q6_K: 8 bits, one scale a block of 256.",
    "resident": "All experts in one memory beside the processor, the usual way.",
    "reuse": "The share of a token's experts that the token before chose in the same layer.",
    "roofline": "The most that a machine can do: either its bandwidth binds or its multipliers do.",
    "routed": "Placed and routed: the tool has put the design on the part's real resources and knows its delays.",
    "router": "A small matrix that picks the experts of a token.",
    "selected": "A schedule: only the experts that some token of the batch wants are fetched, each once.",
    "serial": "Experts stay on storage and flow through the device, layer by layer; memory holds all else.",
    "SwiGLU": "What an expert computes: down(silu(gate x) × up x).",
    "tape": "A schedule: all experts pass in order, always; nothing needs to be chosen ahead, most bytes are drained.",
    "TTFT": "Time to first token: from joining to the first token of the answer.",
    "union": "The different experts that a batch wants in a layer; in selected mode, what is fetched.",
}


def section(inputs: Inputs) -> Section:
    entries = "".join(
        f'<dt id="term-{esc(name)}">{esc(name)}</dt><dd>{esc(text)}</dd>'
        for name, text in sorted(TERMS.items(), key=lambda item: item[0].lower())
    )
    return Section(
        "glossary",
        "Glossary",
        "What do the words mean?",
        f"{len(TERMS)} words; wherever one is underlined with dots, pointing at it or moving there with the keyboard "
        "shows its meaning.",
        Html(f'<dl class="terms">{entries}</dl>'),
    )
