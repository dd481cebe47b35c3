#!/usr/bin/env bash
# Breaks the code in known ways, one at a time, on a copy of the tree; every break must make a test fail.
#   bash tests/mutations.sh [NAME …]     without names: all
set -euo pipefail
top=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python}
case $python in */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;; esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
survived=0
wanted=("$@")

# mutate NAME FILE OLD NEW TESTS…: OLD must stand in FILE exactly once.
mutate() {
  local name=$1 file=$2 old=$3 new=$4
  shift 4
  if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" $name "* ]]; then return; fi
  rm -rf "$work/tree"
  mkdir "$work/tree"
  cp -r "$top/src" "$top/tests" "$top/conf" "$top/assets" "$top/pyproject.toml" "$work/tree"
  OLD=$old NEW=$new "$python" - "$work/tree/$file" <<'PY'
import os, pathlib, sys
path = pathlib.Path(sys.argv[1])
text = path.read_text(encoding="utf-8")
if text.count(os.environ["OLD"]) != 1:
    sys.exit(f"{path.name}: the text to mutate stands there {text.count(os.environ['OLD'])} times, not once")
path.write_text(text.replace(os.environ["OLD"], os.environ["NEW"]), encoding="utf-8")
PY
  if (cd "$work/tree" && PYTHONPATH="$work/tree/src" "$python" -m pytest -x -q -p no:cacheprovider "$@" >"$work/log" 2>&1); then
    echo "SURVIVED  $name"
    survived=$((survived + 1))
  elif grep -qE '^(FAILED|ERROR) ' "$work/log" && ! grep -q 'error during collection' "$work/log"; then
    echo "caught    $name  ($(grep -m1 -oE '^(FAILED|ERROR) [^ ]+' "$work/log"))"
  else
    echo "BROKEN    $name: no test failed, but the run did; its last lines:"
    tail -n 5 "$work/log"
    survived=$((survived + 1))
  fi
}

mutate mask-shift src/specwave/eagle/slots.py \
  'run = run & ahead(answer_BT, step + 2)' 'run = run & ahead(answer_BT, step + 1)' tests/eagle/test_alignment.py
mutate mask-start src/specwave/eagle/slots.py \
  'run, slots = ahead(answer_BT, 1), []' 'run, slots = answer_BT, []' tests/eagle/test_alignment.py
mutate eagle-mask src/specwave/eagle/slots.py \
  'tested = 1 if count_from == "speculators" else 0' 'tested = 1' tests/eagle/test_alignment.py
mutate diagonal-keys src/specwave/eagle/attention.py \
  'return (q_KGNd * key_KNd[:, None]).sum(' 'return (q_KGNd * key_KNd[:, None] * 0).sum(' tests/eagle/test_attention.py
mutate diagonal-values src/specwave/eagle/attention.py \
  'out.addcmul_((score - merged).exp()[..., None].to(out.dtype), value[:, None])' 'pass' tests/eagle/test_attention.py
mutate merged-sum src/specwave/eagle/attention.py \
  '            lse = merged' '            pass' tests/eagle/test_attention.py
mutate target-shift src/specwave/eagle/loss.py \
  'batch.row.flatten()[place_N[slot_n] + 1 + step_n]' 'batch.row.flatten()[place_N[slot_n] + step_n]' tests/eagle/test_loss.py
mutate head-gradient src/specwave/eagle/divergence.py \
  'total += one' 'total.copy_(one)' tests/eagle/test_divergence.py
mutate lk-mass src/specwave/eagle/divergence.py \
  'target_nV * mass_n[:, None]' 'target_nV' tests/eagle/test_divergence.py
mutate document-border src/specwave/eagle/slots.py \
  'slots.append(run & inside(documents_BT, step + 2))' 'slots.append(run)' tests/eagle/test_packing.py
mutate document-keys src/specwave/eagle/slots.py \
  'first_slot + b, first_key, first_key' 'first_slot + b, 0, first_key' tests/eagle/test_packing.py
mutate document-target src/specwave/target/load.py \
  'attend = attend_within(document_spans(documents))' 'pass' tests/eagle/test_packing.py
mutate roll-back src/specwave/target/cache.py \
  'self.advance([len(path) for path in paths])' 'self.advance([max(path) + 1 for path in paths])' tests/target/test_session.py
mutate norm-output src/specwave/eagle/drafter.py \
  'return self.norm(hidden) if self.config.norm_output else hidden' 'return hidden' tests/eagle/test_eagle31.py
mutate norm-twice src/specwave/eagle/drafter.py \
  'return self.lm_head(hidden if self.config.norm_output else self.norm(hidden))' \
  'return self.lm_head(self.norm(hidden))' tests/eagle/test_eagle31.py
mutate stopped-drafter src/specwave/eagle/module.py \
  'if self.training and name in self.stopped:' 'if False:' tests/eagle/test_training.py -k 'nan_stops_that'
mutate best-drafter src/specwave/app/exports.py \
  'better = figures["tau_hat"] >= self.best.get(name, 0.0)' 'better = True' tests/eagle/test_training.py -k 'worse_leaves'
mutate validates-when-late src/specwave/app/trainer.py \
  'trainer.limit_val_batches = 0' 'pass' tests/eagle/test_training.py -k 'time_is_up'
mutate saved-before-validation src/specwave/app/trainer.py \
  'if not validates:' 'if True:' tests/eagle/test_training.py -k 'killed_at_five'
mutate same-prompt src/specwave/data/samples.py \
  'first[two] = one' 'pass' tests/data/test_datamodule.py -k 'several_names'
mutate half-answered src/specwave/app/regenerate.py \
  'settings, growing, longest)' 'settings, path, longest)' tests/app/test_training_data.py -k 'when_all_are_there'
mutate nan-validation src/specwave/eagle/module.py \
  'self._finite(new, "held-out loss")' 'pass' tests/eagle/test_training.py -k 'nan_in_a_validation'
mutate recorded-outputs src/specwave/target/recorded.py \
  'return torch.utils._pytree.tree_map(torch.clone, replay())' 'return replay()' tests/target/test_recorded.py
mutate recorded-inputs src/specwave/target/recorded.py \
  'mine.copy_(given)' 'pass' tests/target/test_recorded.py
mutate path-move src/specwave/target/cache.py \
  'if moved:' 'if False:' tests/target/test_session.py
mutate tree-mask src/specwave/target/cache.py \
  'return (offset < 0)[:, None] | (inside[:, None] & tree_BTT.gather(2, index))' \
  'return ((offset < 0) | inside)[:, None].expand(-1, new, -1)' tests/target/test_session.py
mutate ancestors src/specwave/decoding/tree.py \
  'while span < count:' 'while span < count // 4:' tests/decoding/test_tree.py
mutate draft-roll-back src/specwave/eagle/drafting.py \
  'cache.advance(list(counts))' 'cache.advance([new] * cache.batch)' tests/eagle/test_proposer.py
mutate end-token src/specwave/decoding/stops.py \
  'return tokens[: place + 1]' 'return tokens' tests/decoding/test_loop.py tests/decoding/test_stops.py
mutate noise-reuse src/specwave/decoding/accept.py \
  '(RESIDUAL, TARGET)]' '(1, TARGET)]' tests/decoding/test_distribution.py -k 'alone'
mutate residual src/specwave/decoding/accept.py \
  'residual = (p_end - q_end).clamp(min=0)' 'residual = p_end' tests/decoding/test_distribution.py -k 'alone'
mutate layer-convention src/specwave/target/session.py \
  'if layer in wants.blocks:' 'if layer + 1 in wants.blocks:' tests/target/test_session.py
mutate cka-centring src/specwave/layers/cka.py \
  'result = gram - mean - mean.transpose(-1, -2) + mean.mean(-2, keepdim=True)' 'result = gram' tests/layers/test_cka.py
mutate cka-centring-unbiased src/specwave/layers/cka.py \
  'result = (hollow - part - part.transpose(-1, -2) + whole)' 'result = hollow' tests/layers/test_cka.py
mutate tie-order-positions src/specwave/layers/blocks.py \
  'order = torch.sort(rest, descending=True, stable=True).indices' \
  'order = len(rest) - 1 - torch.sort(rest.flip(0), descending=True, stable=True).indices' tests/layers/test_blocks.py
mutate tie-order-sets src/specwave/layers/groups.py \
  '(-round(group.entropy, 12), group.layers)' '(-round(group.entropy, 12), [-layer for layer in group.layers])' \
  tests/layers/test_search.py
mutate filter-across src/specwave/layers/rows.py \
  'return [part.nonzero()[:, 0] + skip_first for part in parts]' 'return [part.nonzero()[:, 0] for part in parts]' \
  tests/layers/test_rows.py
mutate averaging src/specwave/layers/blocks.py \
  'used = kept[: len(row)]' 'used = kept[len(kept) - len(row) :]' tests/layers/test_rows.py
mutate screening src/specwave/layers/ranking.py \
  'unsure = (self.entropy >= floor - 2 * self.tolerance) & ~self.exact' 'unsure = ~self.exact & False' \
  tests/layers/test_ranking.py
mutate rank-neighbours src/specwave/layers/ranking.py \
  'unsure = ((self.entropy - own).abs() <= 2 * self.tolerance) & ~self.exact' 'unsure = ~self.exact & False' \
  tests/layers/test_ranking.py
mutate weighted-centring src/specwave/layers/stability.py \
  'share = weight / weight.sum()' 'share = torch.ones_like(weight) / len(weight)' tests/layers/test_stability.py
mutate right-neighbour src/specwave/layers/search.py \
  'steep[0] if right_neighbour and steep else 0.0' '0.0' tests/layers/test_search.py
mutate fingerprint-note src/specwave/target/identity.py \
  'if noted["state"] == state:' 'if True:' tests/layers/test_passes.py
mutate cache-owner src/specwave/layers/passes.py \
  'if fingerprint != job.identity.fingerprint or (own, digest) != (job.settings.rows(), job.digest):' 'if False:' \
  tests/layers/test_passes.py
mutate ridge-centring src/specwave/layers/ridge.py \
  'self.gram_FF = sums.xx - torch.outer(sums.x, self.mean_F)' 'self.gram_FF = sums.xx' tests/layers/test_ridge.py
mutate ridge-own-part src/specwave/layers/foresight.py \
  'Ridge(whole - own, damping)' 'Ridge(whole, damping)' tests/layers/test_proxy.py
mutate step-next-token src/specwave/layers/steps.py \
  'torch.tensor(sample.ids, device=target.device)[at + 1]' 'torch.tensor(sample.ids, device=target.device)[at]' \
  tests/layers/test_steps.py
mutate step-foretold src/specwave/layers/steps.py \
  'last_SD = own_NTD[-1][at + 1]' 'last_SD = own_NTD[-1][at]' tests/layers/test_steps.py
mutate step-places src/specwave/layers/steps.py \
  '(told[1:-1] & told[2:])' '(told[:-2] & told[1:-1])' tests/layers/test_steps.py
mutate steps-owner src/specwave/layers/step_passes.py \
  'if held != facts:' 'if False:' tests/layers/test_step_passes.py
mutate rerank-order src/specwave/app/rerank.py \
  'key=lambda entry: (-entry[1].tau_hat, entry[0])' 'key=lambda entry: entry[0]' tests/app/test_rerank.py
mutate invariant-attention src/specwave/target/session.py \
  'if view.visible is not None:' 'if False:' tests/decoding/test_invariant.py
mutate prefill-chunks src/specwave/decoding/loop.py \
  'session.advance([min(max(count - start, 0), part.shape[1]) for count in counts])' \
  'session.advance([part.shape[1] for count in counts])' tests/decoding/test_invariant.py
mutate tie-order-vocabulary src/specwave/eagle/vocab.py \
  'order = torch.argsort(counts, descending=True, stable=True)' \
  'order = len(counts) - 1 - torch.argsort(counts.flip(0), descending=True, stable=True)' tests/eagle/test_vocab.py
mutate adapter-gradient src/specwave/skipping/distil.py \
  '(log_q.exp() - p).to(head_VD.dtype) @ head_VD' '(log_q.exp() + p).to(head_VD.dtype) @ head_VD' tests/skipping/test_distil.py
mutate adapter-shift src/specwave/skipping/distil.py \
  'live_BT = following(batch["answer"])' 'live_BT = batch["answer"]' tests/skipping/test_distil.py
mutate adapter-chain src/specwave/skipping/distil.py \
  'going = going & live_BT' 'pass' tests/skipping/test_distil.py
mutate adapter-forgets src/specwave/skipping/kangaroo.py \
  'self.cache.lengths = list(self.known)' 'pass' tests/skipping/test_kangaroo.py -k 'whole_text'
mutate adapter-waits src/specwave/skipping/kangaroo.py \
  'self.known[place] += len(fresh[place]) - 1' 'self.known[place] += len(fresh[place])' \
  tests/skipping/test_kangaroo.py -k 'whole_text'
mutate adapter-owner src/specwave/skipping/adapter_folder.py \
  'if made_for["fingerprint"] != target.fingerprint and not allow_other_target:' 'if False:' \
  tests/skipping/test_kangaroo.py -k 'other_targets'
mutate chain-files src/specwave/app/steps.py \
  'digests = [digest(path) for path in outside(kept, root)]' 'digests = list[str]()' \
  tests/app/test_chain.py::test_a_folder_is_known_by_its_files
mutate chain-moved src/specwave/app/steps.py \
  '.replace(json.dumps(str(root))[1:-1], "")' '' tests/app/test_chain.py::test_a_fingerprint_is_of_what_matters
mutate chain-order src/specwave/app/steps.py \
  'name: common | settings | {' 'name: settings | common | {' tests/app/test_chain.py::test_settings_of_a_step
mutate further-process src/specwave/app/job.py \
  'run.resume = run.resume or earlier is not None' 'run.resume = run.resume' \
  tests/app/test_launchers.py::test_a_further_process_does_what_the_first_one_does
mutate search-twice src/hydra_plugins/specwave_optuna/sweeper.py \
  'if chosen in known or chosen in batch:' 'if False:' \
  tests/app/test_launchers.py::test_a_search_finds_the_best_and_tries_nothing_twice
mutate seeds-failed src/specwave/app/sweep_tables.py \
  'done = [job for job in jobs if job["status"] == "finished"]' 'done = list(jobs)' \
  tests/app/test_collate.py::test_means_over_seeds_by_hand
mutate grid-failed src/specwave/app/sweep_grid.py \
  'value = job.get(name) if job is not None and job["status"] == "finished" else None' \
  'value = job.get(name) if job is not None else None' tests/app/test_collate.py
mutate numbered-gpu src/specwave/app/trainer.py \
  'return self.per_node if device.index is None else [device.index]' 'return self.per_node' tests/eagle/test_training.py
mutate new-keys src/specwave/app/run.py \
  'if filled(old, new) != old:' 'if False:' tests/app/test_run.py
mutate invariant-clock src/specwave/eagle/tuning.py \
  'times = clock(target, invariant=invariant)' 'times = clock(target)' tests/eagle/test_tuning.py
mutate late-question src/specwave/benchmark/evaluator.py \
  'monotonic() > self.end' 'monotonic() < self.end' tests/benchmark/test_parts.py
mutate two-clocks src/specwave/benchmark/answering.py \
  'return begun & foreign' 'return set()' tests/benchmark/test_parts.py
mutate one-clock src/specwave/benchmark/answering.py \
  'return begun & foreign' 'return begun' tests/benchmark/test_parts.py
mutate other-repeats src/specwave/benchmark/answering.py \
  'elif len(turns) != self.repeat:' 'elif False:' tests/benchmark/test_parts.py
mutate unsaid-machines src/specwave/benchmark/tables.py \
  'if any(len(result.machines) > 1' 'if all(len(result.machines) > 1' tests/benchmark/test_tables.py
mutate one-rule src/specwave/benchmark/paper.py \
  '[*result.rules] if printed and result.rules else [rule]' '[rule]' tests/benchmark/test_tables.py
mutate stream-warm-up src/specwave/benchmark/answering.py \
  'if getattr(proposer, "scope", "sequence") == "stream":' 'if False:' tests/benchmark/test_evaluator.py
mutate watch-window src/specwave/skipping/windows.py \
  'del own[: -self.window]' 'pass' tests/skipping/test_knapspec.py
mutate domain-kind src/specwave/copying/answers.py \
  'if one.domain == domain), self.n)' 'if one.among([domain])), self.n)' tests/copying/test_assess.py
mutate terminated src/specwave/app/trainer.py \
  '        end_on_terminate(trainer)' '        pass' tests/eagle/test_training.py -k 'terminated'
mutate terminated-sweep src/specwave/app/job.py \
  'if stop.code == TERMINATED:' 'if False:' tests/app/test_run.py -k 'terminated_sweep'
mutate full-disk src/specwave/app/job.py \
  'if isinstance(error, OSError) and error.errno in FULL:' 'if False:' tests/app/test_run.py -k 'too_full'
mutate sent-before src/specwave/app/hub.py \
  "remedy += f\"; sent before it: {', '.join(sent.values())}\" if sent else \"\"" 'pass' tests/app/test_hub.py -k 'midway'
mutate vllm-layers src/specwave/data/producer.py \
  '[layer + 1 for layer in self.layers]' 'list(self.layers)' tests/eagle/test_states_vllm.py
mutate layers-named-twice src/specwave/eagle/formats.py \
  'if shifted and shifted != named:' 'if False:' tests/eagle/test_formats.py -k 'not_read'
mutate oracle-time src/specwave/copying/hindsight.py \
  'contexts[0].session.aside_seconds += aside' 'pass' tests/copying/test_composite.py
mutate shared-baseline src/specwave/benchmark/interop.py \
  'if not _shown(result, found[:place])]' 'if result]' tests/benchmark/test_accounts.py
mutate door-steps src/specwave/app/steps.py \
  'step.partition("_")[0] == name]' 'step == name]' tests/app/test_chain.py

if [ "$survived" -gt 0 ]; then
  echo "$survived mutations were not caught"
  exit 1
fi
