#!/bin/bash
# Written by hpc-rl VERSION from templates/local.sh.j2; edits are lost at the next submission.
# trial   /WORKDIR/quickstart/runs/user/sums/rw
# config  sha256 SHA256
# again   hpc-rl render --config /WORKDIR/quickstart/runs/user/sums/rw/config.yaml
#
# Runs the trial on this machine, detached: the part of a batch script without a scheduler. By hand: bash /WORKDIR/quickstart/runs/user/sums/rw/scripts/local.sh
set -euo pipefail

# ==== SITE: what this machine needs (module load …); override the block `site`: hpc-rl templates eject ====
set +u
set -u
# ==== end of SITE ====

# --- environment of every process -------------------------------------------------------------------
umask 077
trial_dir=/WORKDIR/quickstart/runs/user/sums/rw
workdir=/WORKDIR
python=/PYTHON
# The code of the submission travels with the trial; then the directory of the submission, for code of the user's own.
export PYTHONPATH="$trial_dir"/scripts/hpc_rl-WHEEL.zip:"$workdir"${PYTHONPATH:+":$PYTHONPATH"}
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
unset PYTHONHOME PYTHONSTARTUP
# What a surrounding MPI job or the login node left behind would mislead libraries that look for a launcher.
unset "${!PMI@}" "${!OMPI_@}" RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
if [[ -n ${TMPDIR:-} && ! -w $TMPDIR ]]; then unset TMPDIR; fi
TZ=UTC printf -v job_id 'local-%(%Y%m%d-%H%M%S)T-%04x' -1 $((RANDOM + RANDOM))
job_id=${1:-$job_id}
scheduler=local steps=process restart=0 max_restarts=20
cd "$workdir" || cd "$trial_dir"

out_of_time() { false; } # there is no time limit here
ask_again() { false; }

start_again() {
  if ((restart >= max_restarts)); then
    reason="stopped $max_restarts times"
    return 1
  fi
  record requeued "\"code\": $rc"
  restart=$((restart + 1))
  drain_intent=$trial_dir/intent/drain-$job_id.$restart.json
}

# --- exit-code policy, the same in trial.sbatch and local.sh ------------------------------------------
# 0 done. 75 stopped on purpose with its state saved: start again, unless a person wants the job dead or the mode is
# disabled. Killed by a signal: the supervisor starts again in place. Anything else ends the job with that code.
# After a TERM to this script nothing is ever started again, unless the scheduler says that the time limit sent it: a
# requeue of a cancelled job would succeed, and bring it back to life; preemption and lost nodes the scheduler requeues itself.
mode=auto start_mode=auto
max_kills=5 hang_s=${HPC_RL_SUPERVISOR_HANG_S:-600}
cancel_intent=$trial_dir/intent/cancel-$job_id.json
drain_intent=$trial_dir/intent/drain-$job_id.$restart.json
supervisor_pid='' told_to_end=0 interrupted=0 rc=0 reason='' cancelled=false time_limit='' requeued=0

say() { printf '%(%Y-%m-%dT%H:%M:%S%z)T job %s: %s\n' -1 "$job_id" "$*" >&2; }

record() { # EVENT [MORE]: one line of JSON in one write to jobs/<job id>.state, which `hpc-rl status` reads
  local line
  printf -v line '{"event": "%s", "time": %(%s)T, "restart": %d%s}' "$1" -1 "$restart" "${2:+, $2}"
  printf '%s\n' "$line" >>"$trial_dir/jobs/$job_id.state" || say "can't write jobs/$job_id.state"
}

leave_submission_record() { # where the script was handed in by hand; the record of `hpc-rl submit` is never replaced
  local temp=$trial_dir/jobs/.$job_id.json.$$
  if [[ ! -e $trial_dir/jobs/$job_id.json ]]; then
    printf '{"job_id": "%s", "scheduler": "%s", "start_mode": "%s", "time": %(%s)T, "command": ["%s"]}\n' \
      "$job_id" "$scheduler" "$start_mode" -1 "$scheduler" >"$temp"
    ln "$temp" "$trial_dir/jobs/$job_id.json" 2>/dev/null || true
    rm -f "$temp"
  fi
}

identify() { # host, pid and kernel start time: what tells this process from a later one with the same pid
  local host stat
  read -r host </proc/sys/kernel/hostname
  read -r stat </proc/$$/stat
  read -ra stat <<<"${stat##*) }"
  printf '"host": "%s", "pid": %d, "start_ticks": %d' "$host" "$$" "${stat[19]}"
}

forward() { # SIGNAL: to the supervisor
  interrupted=1
  if [[ -n $supervisor_pid ]]; then kill -s "$1" "$supervisor_pid" 2>/dev/null || true; fi
}
# shellcheck disable=SC2329 # a trap calls it
leave_drain_intent() { # a wish that outlives a supervisor which is killed, or does not listen yet
  [[ -e $drain_intent ]] || printf '{"reason": "SIGUSR1", "time": %(%s)T}\n' -1 >"$drain_intent" || true
}
# shellcheck disable=SC2329 # a trap calls it
told() {
  told_to_end=1
  forward TERM
}
trap told TERM INT HUP
trap 'leave_drain_intent; forward USR1' USR1

guard_supervisor() { # PID: one that does nothing at all for long (stopped, or stuck) is killed, and so started again
  local ticks last='' stat idle_s=0 sleep_pid='' period_s=$((hang_s < 10 ? hang_s : 10))
  trap 'kill "$sleep_pid" 2>/dev/null; exit' TERM
  while read -r stat 2>/dev/null <"/proc/$1/stat"; do
    sleep "$period_s" 2>/dev/null & # killed before its number is known it stays, and must keep no output open
    sleep_pid=$!
    wait "$sleep_pid" || return
    read -ra ticks <<<"${stat##*) }"
    if [[ ${ticks[11]}.${ticks[12]} == "$last" ]]; then idle_s=$((idle_s + period_s)); else idle_s=0; fi
    last=${ticks[11]}.${ticks[12]}
    if ((idle_s >= hang_s)); then
      say "the supervisor did nothing for $idle_s s: it is killed"
      kill -s KILL "$1" 2>/dev/null || true
    fi
  done
}

look_for_time_limit() { # once, after a TERM: if it was the time limit's, ask to go on later, and do it now: KILL may follow soon
  if [[ -n $time_limit ]]; then return; fi
  time_limit=no
  if ! out_of_time; then return; fi # out_of_time and ask_again are the scheduler's own, above
  time_limit=yes
  if [[ $mode != disabled && ! -e $cancel_intent ]] && ask_again '"reason": "the time limit"'; then requeued=1; fi
}

wait_for() { # PID: to its end; its code is in `rc`
  while :; do # a trap makes wait return early, and bash still knows the code of a process that ended meanwhile
    interrupted=0 rc=0
    wait "$1" || rc=$?
    ((interrupted)) || break
    if ((told_to_end)); then look_for_time_limit; fi
  done
}

run_supervisor() {
  local guard_pid
  # USR1 is ignored until the supervisor handles it: a nudge must not kill it while it starts.
  (trap '' USR1; HPC_RL_SCRIPT_PID=$$ exec "$python" -m hpc_rl.app.supervisor --trial_dir "$trial_dir" --attempt "$job_id.$restart" --steps "$steps") </dev/null &
  supervisor_pid=$!
  guard_supervisor "$supervisor_pid" </dev/null >/dev/null &
  guard_pid=$!
  if ((told_to_end)); then forward TERM; fi
  wait_for "$supervisor_pid"
  supervisor_pid=''
  kill "$guard_pid" 2>/dev/null || true
}

run_attempt() { # the supervisor, again in place while something kills it
  local kills=0
  rc=143 # where nothing is to be started
  while ((!told_to_end)) && [[ ! -e $cancel_intent ]]; do
    run_supervisor
    if ((rc <= 128 || kills >= max_kills)); then return; fi
    kills=$((kills + 1))
    record supervisor_killed "\"code\": $rc"
    say "the supervisor was killed (code $rc), time $kills of at most $max_kills"
  done
}

may_start_again() { # else `reason` says why not
  if ((rc == 0)); then
    reason='done'
  elif ((requeued)); then
    return 0
  elif [[ -e $cancel_intent ]]; then
    reason='cancelled by a person' cancelled=true
  elif ((told_to_end)) && [[ $time_limit == yes ]]; then
    reason='the time limit was reached, and it could not be started again'
  elif ((told_to_end)); then
    reason='told to end by a signal' cancelled=true
  elif ((rc > 128)); then
    reason='the supervisor was killed too often'
  elif ((rc != 75)); then
    reason='the supervisor gave up; events.jsonl of the attempt says why'
  elif [[ $mode == disabled ]]; then
    reason='stopped, and recover.mode is disabled'
  else
    return 0
  fi
  return 1
}

leave_submission_record
while :; do
  record started "$(identify)"
  run_attempt
  if ! may_start_again || ! start_again; then break; fi # start_again is the scheduler's own, above
done
record ended "\"code\": $rc, \"cancelled\": $cancelled, \"reason\": \"$reason\""
say "ended with code $rc: $reason"
exit "$rc"
