"""Serving decoders: an engine with paged memory, an OpenAI-compatible API and a page to try it.

A request's life:

1. `server` checks the body (`fields`, `api`), tokenizes text (`text`) and hands a `Request` to the engine's `loop`.
2. `scheduler` decides, as a pure function, which sequences compute how many tokens in the next step.
3. `pages` finds what of a prompt is in the cache already, and hands out pages for the rest.
4. `runner` puts the tokens of all sequences through the one decoder, as one row; `sampler` picks each next token. On a
   GPU `decode` does both in one launch where every sequence decodes.
5. `detokenize` makes text of tokens, never half a character, and watches for stop strings.
6. What is new goes back through `loop` to the connection; a client that leaves takes its sequences with it.
"""
