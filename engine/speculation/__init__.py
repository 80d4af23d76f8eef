"""Speculative decoding: drafts, their verification, and how many of them pay.

`base` says what a draft and a drafter are, `ngram` proposes from the request's own text, `limits` cuts drafts
to what a request has room for, `verify` keeps what the target model agrees with, `adaptive` decides how many
tokens to draft, and `speculator` puts drafts into the engine's steps.
"""

MAX_DRAFT = 16
"""Most tokens that are drafted for one request in one step. Here, as the list of knobs needs no torch."""
