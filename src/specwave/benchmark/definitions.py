"""What every figure of a results.json means; written into each of them."""

from __future__ import annotations

DEFINITIONS: dict[str, str] = {
    "tau": "tokens committed per verification forward of the target: sum of accept_lengths / rounds (accepted "
    "drafts plus the target's own token of the round). Prefill is no round; tokens after the end token or beyond "
    "the limit are not counted. Plain decoding has 1.",
    "tau_per_question": "mean over questions of each one's own tau: short answers weigh as much as long ones.",
    "accept_lengths": "per round, the tokens it committed: accepted drafts plus one. Flat over a question's turns.",
    "tokens": "new tokens committed, counted as token ids where they are made (never re-tokenised text); the end "
    "token counts, nothing after it. Repetitions add up.",
    "rounds": "verification forwards of the target (decoding_steps), prefill not counted. Repetitions add up.",
    "wall_time": "seconds of decoding one turn: from the prompt's ids to the last new token, prefill, drafting and "
    "verification included; tokenising, templates, detokenising and writing are not.",
    "tokens_per_second": "sum of tokens / sum of wall_time (token-weighted; prefill is in the time).",
    "tokens_per_second_per_question": "mean over questions of each one's tokens / wall_time. Spec-Bench's speed.py "
    "calls this `Tokens per second`.",
    "seconds_per_token": "sum of wall_time / sum of tokens.",
    "speedup": "tokens_per_second of the method / that of plain decoding on the same target, dtype and machine, "
    "both over the questions that both finished.",
    "speedup_per_question": "tokens_per_second_per_question of the method / that of plain decoding, both over the "
    "questions that both finished. Spec-Bench's speed.py calls this `Speedup ratio` (and re-tokenises the "
    "baseline's text to count its tokens, which is not done here).",
    "peak_memory_bytes": "largest peak while answering: on a GPU of the memory allocated during the question; on a "
    "CPU of the process's resident memory so far, which methods measured in one process share.",
    "exact_match_rate": "share of questions whose every turn equals the target's own greedy output token for token. "
    "In float32 a listed near-tie is excused and decoding is compared again from the target's token on. null when "
    "sampling. Of repetitions the first is compared.",
    "near_ties": "float32 only: divergences at positions where the tokens' scores differ by at most 10 times the "
    "measured noise of the logits (one-shot against token by token). null in other dtypes, where none is excused.",
    "questions": "questions answered. A question that raised an error is a row with `error` and counts in failed only.",
    "failed": "questions that raised an error.",
    "intervals": "[low, high] of tau, tokens_per_second and speedup: the middle 95 % of 2,000 resamples of the "
    "questions (drawn with replacement, seeded; a question with both methods' figures, so that a ratio is paired). "
    "They say how far another choice of questions of this kind would move the figure; not what another training "
    "seed of the drafter, or another day on the machine, would.",
    "acceptance": "by draft position, first draft first. `conditional`: of the rounds whose draft had a token there "
    "and whose earlier drafts were all accepted (`reached`), the share in which this one was, too. `vllm`: vLLM's "
    "per-position acceptance rate, accepted drafts at the position / rounds in which anything was drafted "
    "(`drafts`); it falls with the position even where `conditional` does not. `rate`: accepted drafts / drafted "
    "levels, which for chains is vLLM's draft acceptance rate. A tree counts as deep as its deepest draft might be, "
    "its levels; an accepted path that ends at a leaf above them counts as a rejection below. In the round that "
    "ends an answer the last token counts as the target's own. null where nothing was drafted.",
    "sources": "by source of drafts (a copy, the drafter, an arm; plain is nobody): `rounds` it drafted for and their "
    "`share` of all, for a copy its trigger rate; `hits`, those in which one of its drafts was accepted at least, and "
    "`in_vain`, the share of the others, for a copy its false-trigger rate; `drafted` and `accepted` tokens, also "
    "`_a_round` of its own; `draft_seconds` spent on asking it, in rounds of others too; `seconds` of its rounds, "
    "prefill not counted. null for methods with one source that keep no account.",
    "time": "seconds of all turns by phase; they add up to wall_time. prefill: the prompt without its last token, "
    "and what the method does with it; draft: proposing and observing; verify: the target's forwards over root and "
    "drafts; accept: choosing tokens, committing, rolling back; other: the rest.",
    "latency": "p50, p90, p99 over turns, in seconds: `turn` is wall_time, `prefill` its prefill, `round` what "
    "remains / rounds (the mean wait between two pieces of text), `token` wall_time / tokens.",
    "repetitions": "with repeat > 1, tokens_per_second and speedup of every repetition by itself, and the 95 % "
    "intervals of their means by Student's t: what timing noise alone does. null for one repetition.",
    "machines": "marks of the machines on which the answers were timed, hashes of name and device. Of more than one, "
    "tokens_per_second mixes their clocks; each question was answered by all methods and by plain decoding on one of "
    "them, unless the baseline is an earlier run's.",
    "drafter": "parameters: the floating-point numbers of its file; bytes: of all its tensors as stored, vocabulary "
    "map included. Not counted: the layer of zeros with which a drafter of one layer is padded for engines, and what "
    "it shares with the target (the embedding). null without a drafter.",
    "per_question": "the sums behind the figures, a record per answered question; plain_tokens and plain_seconds "
    "are plain decoding's on the same question, draft_seconds the time of drafting. Paired comparisons of methods are "
    "made from these.",
}
