"""The tables, as of each version. Rows are kept whole, as JSON, beside the columns that lists need.

A request row is what was measured, field by field as the protocol or the generator names it; the view
``request_view`` spreads the main ones into columns for people who query the file themselves.
"""

from __future__ import annotations

VERSION = 3

V1 = """
CREATE TABLE baseline (
    id TEXT PRIMARY KEY NOT NULL,
    created_unix_ms INTEGER NOT NULL,
    name TEXT NOT NULL,
    note TEXT NOT NULL,
    source TEXT NOT NULL CHECK (source IN ('live', 'load')),
    locked INTEGER NOT NULL DEFAULT 0 CHECK (locked IN (0, 1)),
    imported INTEGER NOT NULL DEFAULT 0 CHECK (imported IN (0, 1)),
    valid INTEGER NOT NULL CHECK (valid IN (0, 1)),
    model TEXT NOT NULL,
    device TEXT NOT NULL,
    requests INTEGER NOT NULL,
    ttft_p50_s REAL,
    ttft_p99_s REAL,
    tpot_p50_s REAL,
    output_tok_s REAL,
    head TEXT NOT NULL
) STRICT;
CREATE INDEX baseline_created ON baseline (created_unix_ms);
CREATE TABLE setting (
    baseline_id TEXT NOT NULL REFERENCES baseline (id) ON DELETE CASCADE,
    knob TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (baseline_id, knob)
) STRICT, WITHOUT ROWID;
CREATE TABLE request (
    baseline_id TEXT NOT NULL REFERENCES baseline (id) ON DELETE CASCADE,
    kind TEXT NOT NULL CHECK (kind IN ('engine', 'load')),
    idx INTEGER NOT NULL,
    row TEXT NOT NULL,
    PRIMARY KEY (baseline_id, kind, idx)
) STRICT, WITHOUT ROWID;
CREATE VIEW request_view AS
    SELECT baseline_id, kind, idx,
        json_extract(row, '$.rid') AS rid, json_extract(row, '$.tag') AS tag,
        json_extract(row, '$.prompt_tok') AS prompt_tok, json_extract(row, '$.cached_tok') AS cached_tok,
        json_extract(row, '$.output_tok') AS output_tok, json_extract(row, '$.finish') AS finish,
        coalesce(json_extract(row, '$.intended_ns'), json_extract(row, '$.arrive_ns')) AS start_ns,
        json_extract(row, '$.first_ns') AS first_ns, json_extract(row, '$.last_ns') AS last_ns,
        json_extract(row, '$.end_ns') AS end_ns
    FROM request;
"""

# Rows of version 2 may tell of preemptions and stages; the view shows them, and older rows as they are.
V2 = """
DROP VIEW request_view;
CREATE VIEW request_view AS
    SELECT baseline_id, kind, idx,
        json_extract(row, '$.rid') AS rid, json_extract(row, '$.tag') AS tag,
        json_extract(row, '$.prompt_tok') AS prompt_tok, json_extract(row, '$.cached_tok') AS cached_tok,
        json_extract(row, '$.output_tok') AS output_tok, json_extract(row, '$.finish') AS finish,
        coalesce(json_extract(row, '$.intended_ns'), json_extract(row, '$.arrive_ns')) AS start_ns,
        json_extract(row, '$.first_ns') AS first_ns, json_extract(row, '$.last_ns') AS last_ns,
        json_extract(row, '$.end_ns') AS end_ns,
        coalesce(json_extract(row, '$.result_cached'), 0) AS result_cached,
        coalesce(json_extract(row, '$.preempt_n'), 0) AS preempt_n,
        coalesce(json_extract(row, '$.swap_n'), 0) AS swap_n,
        coalesce(json_extract(row, '$.lost_tok'), 0) AS lost_tok,
        coalesce(json_extract(row, '$.recompute_us'), 0) AS recompute_us,
        json_extract(row, '$.tokenize_us') AS tokenize_us, json_extract(row, '$.plan_us') AS plan_us,
        json_extract(row, '$.prepare_us') AS prepare_us, json_extract(row, '$.copy_us') AS copy_us,
        json_extract(row, '$.forward_us') AS forward_us, json_extract(row, '$.sample_us') AS sample_us,
        json_extract(row, '$.detokenize_us') AS detokenize_us, json_extract(row, '$.send_us') AS send_us
    FROM request;
"""

# Rows of version 3 may tell of drafts.
V3 = """
DROP VIEW request_view;
CREATE VIEW request_view AS
    SELECT baseline_id, kind, idx,
        json_extract(row, '$.rid') AS rid, json_extract(row, '$.tag') AS tag,
        json_extract(row, '$.prompt_tok') AS prompt_tok, json_extract(row, '$.cached_tok') AS cached_tok,
        json_extract(row, '$.output_tok') AS output_tok, json_extract(row, '$.finish') AS finish,
        coalesce(json_extract(row, '$.intended_ns'), json_extract(row, '$.arrive_ns')) AS start_ns,
        json_extract(row, '$.first_ns') AS first_ns, json_extract(row, '$.last_ns') AS last_ns,
        json_extract(row, '$.end_ns') AS end_ns,
        coalesce(json_extract(row, '$.result_cached'), 0) AS result_cached,
        coalesce(json_extract(row, '$.preempt_n'), 0) AS preempt_n,
        coalesce(json_extract(row, '$.swap_n'), 0) AS swap_n,
        coalesce(json_extract(row, '$.lost_tok'), 0) AS lost_tok,
        coalesce(json_extract(row, '$.recompute_us'), 0) AS recompute_us,
        json_extract(row, '$.tokenize_us') AS tokenize_us, json_extract(row, '$.plan_us') AS plan_us,
        json_extract(row, '$.prepare_us') AS prepare_us, json_extract(row, '$.copy_us') AS copy_us,
        json_extract(row, '$.forward_us') AS forward_us, json_extract(row, '$.sample_us') AS sample_us,
        json_extract(row, '$.detokenize_us') AS detokenize_us, json_extract(row, '$.send_us') AS send_us,
        coalesce(json_extract(row, '$.drafts_n'), 0) AS drafts_n,
        coalesce(json_extract(row, '$.drafted_tok'), 0) AS drafted_tok,
        coalesce(json_extract(row, '$.accepted_tok'), 0) AS accepted_tok
    FROM request;
"""
