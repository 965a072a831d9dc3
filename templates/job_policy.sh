# shellcheck shell=bash
# The policy of a job: what follows from each exit code, signals, the guard of the supervisor, the watch over
# the first node, requeue and successors, hooks. The same file for every trial of a version. Needs bash 4.4.
#
# trial.sbatch, servers.sbatch and local.sh set what is configured, source this file, and call `run_job "$@"`.
#
# After a TERM to this script nothing is ever started again, unless Slurm reports that the time limit sent it:
# a requeue of a cancelled job would succeed, and bring it back to life. Preempted jobs and lost nodes are
# requeued by Slurm itself.
#
# shellcheck disable=SC2154 # the job script sets what is configured

# shellcheck source=/dev/null
source "$trial_dir/scripts/exit_policy.sh"
max_restarts=20 hang_s=${HPC_RL_SUPERVISOR_HANG_S:-600}
supervisor_pid='' told_to_end=0 interrupted=0 rc=0 action='' reason='' cancelled=false
time_limit='' requeued=0 cause='' row=''
hook_failure='' hook_pid='' preempt_pid='' watcher_pids=() others=()

# --- names of this job and of its files ---------------------------------------------------------------------

name_job() { # [SUBMISSION START [TRIAL_JOB]]: a successor gets the submission and the number of its start
  if [[ $scheduler != slurm ]]; then
    TZ=UTC printf -v job_id "$scheduler-%(%Y%m%d-%H%M%S)T-%04x" -1 $((RANDOM + RANDOM))
    job_id=${1:-$job_id} steps=process restart=0
    if [[ $scheduler == allocation ]]; then steps=srun; fi
  else
    slurm_job=$SLURM_JOB_ID trial_job=''
    if [[ $script_name == servers.sbatch ]]; then
      # SLURM_JOB_ID of one task of every array is the id of the whole array.
      slurm_job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
      # All tasks serve the trial that runs as this job.
      trial_job=${3:-}
      export HPC_RL_TRIAL_JOB=$trial_job HPC_RL_ARRAY_TASK=$SLURM_ARRAY_TASK_ID
    fi
    job_id=${1:-$slurm_job} steps=srun restart=$((${2:-0} + ${SLURM_RESTART_COUNT:-0}))
  fi
  cancel_intent=$trial_dir/intent/cancel-$job_id.json
  drain_intent=$trial_dir/intent/drain-$job_id.$restart.json
}

clear_slurm_defaults() { # every srun states what it needs: what sbatch derived must not override that
  unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK
  unset SLURM_MEM_PER_NODE SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_TRES_PER_TASK
  unset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK
  export SLURM_EXPORT_ENV=ALL
  if [[ $scheduler == allocation || $backend == submitit ]]; then
    # submitit, and an interactive shell, run this script in a step: its variables would mislead those of the roles.
    unset "${!SLURM_STEP@}" "${!SLURM_CPU_BIND@}"
    unset SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_TASK_PID SLURM_DISTRIBUTION
    export SLURM_NNODES=$SLURM_JOB_NUM_NODES
  fi
}

raise_limits() { # the soft ones are the login node's; core dumps of GPU processes fill shared disks
  local files
  files=$(ulimit -Hn)
  # Programs that loop over every possible descriptor become slow beyond it.
  if [[ $files == unlimited ]] || ((files > 1048576)); then files=1048576; fi
  ulimit -Sn "$files" || true
  ulimit -Sl "$(ulimit -Hl)" || true
  ulimit -Sc 0 || true
}

# --- records ------------------------------------------------------------------------------------------------

say() { printf '%(%Y-%m-%dT%H:%M:%S%z)T job %s: %s\n' -1 "$job_id" "$*" >&2; }

record() { # EVENT [MORE]: one line of JSON in one write to jobs/<job id>.state, which `hpc-rl status` reads
  local line
  printf -v line '{"event": "%s", "time": %(%s)T, "restart": %d%s}' "$1" -1 "$restart" "${2:+, $2}"
  printf '%s\n' "$line" >>"$trial_dir/jobs/$job_id.state" || say "can't write jobs/$job_id.state"
}

leave_submission_record() { # where the script was submitted by hand; that of `hpc-rl submit` is kept
  local temp=$trial_dir/jobs/.$job_id.json.$$ first=${from_step:+\"from_step\": $from_step, }
  if ((new_batches)); then first+='"new_batches": true, '; fi
  if [[ ! -e $trial_dir/jobs/$job_id.json ]]; then
    printf '{"job_id": "%s", "scheduler": "%s", "start_mode": "%s", %s"time": %(%s)T, "command": ["%s"]}\n' \
      "$job_id" "$scheduler" "$start_mode" "$first" -1 "$scheduler" >"$temp"
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

# --- signals ------------------------------------------------------------------------------------------------

forward() { # SIGNAL: to the supervisor
  interrupted=1
  if [[ -n $supervisor_pid ]]; then kill -s "$1" "$supervisor_pid" 2>/dev/null || true; fi
}

# shellcheck disable=SC2329 # a trap calls it
leave_drain_intent() { # a request that outlives a supervisor which is killed, or does not listen yet
  if [[ -e $drain_intent ]]; then return; fi
  printf '{"cause": "user_signal", "reason": "SIGUSR1", "time": %(%s)T}\n' -1 >"$drain_intent" || true
}

# shellcheck disable=SC2329 # a trap calls it
told() {
  told_to_end=1
  forward TERM
  if [[ -n $hook_pid ]]; then kill "$hook_pid" 2>/dev/null || true; fi
  on_preempt
}

out_of_time() { # asked after a TERM: after a cancel or a preemption Slurm's reason is another
  [[ $scheduler == slurm && $(timeout 20 scontrol show job -o "$slurm_job") == *' Reason=TimeLimit '* ]]
}

look_for_time_limit() { # once, after a TERM: if the time limit sent it, ask for the next start now
  if [[ -n $time_limit ]]; then return; fi
  time_limit=no
  if ! out_of_time; then return; fi
  time_limit=yes
  if [[ $recover_mode == disabled || -e $cancel_intent ]]; then return; fi
  if [[ ${after_stop[time_limit]} == start_again ]] &&
    ask_again '"cause": "time_limit", "reason": "the time limit"'; then requeued=1; fi
}

wait_for() { # PID: until it exits; its code is in `rc`
  # A trap makes wait return early, and bash still knows the code of a process that exited meanwhile.
  while :; do
    interrupted=0 rc=0
    wait "$1" || rc=$?
    ((interrupted)) || break
    if ((told_to_end)); then look_for_time_limit; fi
  done
}

# --- the supervisor -----------------------------------------------------------------------------------------

guard_supervisor() { # PID: one that does nothing at all for `hang_s` (stopped, or stuck) is killed
  local ticks last='' stat idle_s=0 sleep_pid='' period_s=$((hang_s < 10 ? hang_s : 10))
  trap 'kill "$sleep_pid" 2>/dev/null; exit' TERM
  while read -r stat 2>/dev/null <"/proc/$1/stat"; do
    # A sleep that is started as the TERM comes outlives this guard, and must keep no output open.
    sleep "$period_s" 2>/dev/null &
    sleep_pid=$!
    wait "$sleep_pid" || return
    read -ra ticks <<<"${stat##*) }"
    # In state D it waits for a file system or a device; a fail-over of those may take minutes.
    if [[ ${ticks[11]}.${ticks[12]} == "$last" && ${ticks[0]} != D ]]; then idle_s=$((idle_s + period_s)); else idle_s=0; fi
    last=${ticks[11]}.${ticks[12]}
    if ((idle_s >= hang_s)); then
      say "the supervisor did nothing for $idle_s s: it is killed"
      kill -s KILL "$1" 2>/dev/null || true
    fi
  done
}

run_supervisor() {
  local guard_pid
  # USR1 is ignored until the supervisor handles it: a nudge must not kill it while it starts.
  (
    trap '' USR1
    HPC_RL_SCRIPT_PID=$$ exec "$python" -m hpc_rl.app.supervisor \
      --trial_dir "$trial_dir" --attempt "$job_id.$restart" --steps "$steps"
  ) </dev/null &
  supervisor_pid=$!
  guard_supervisor "$supervisor_pid" </dev/null >/dev/null &
  guard_pid=$!
  if ((told_to_end)); then forward TERM; fi
  wait_for "$supervisor_pid"
  supervisor_pid=''
  kill "$guard_pid" 2>/dev/null || true
}

has_new_generation() { # since the last call; `generations_seen` is the caller's
  local generation found=1
  for generation in "$trial_dir"/recover/gen-*; do
    if [[ -e $generation && -z ${generations_seen[$generation]:-} ]]; then found=0; fi
    generations_seen[$generation]=1
  done
  return "$found"
}

run_attempt() { # the supervisor, again in place while something kills it, as often as a role that fails
  local kills=0
  local -A generations_seen=()
  has_new_generation || true
  # The code where nothing is to be started.
  rc=143
  while ((!told_to_end)) && [[ ! -e $cancel_intent ]]; do
    run_supervisor
    choose_action
    if has_new_generation; then kills=0; fi
    # After a TERM it may well be Slurm that killed it, and nothing is started.
    if [[ $action != restart_supervisor ]] || ((kills >= recover_retries || told_to_end)); then return; fi
    kills=$((kills + 1))
    record supervisor_killed "\"code\": $rc"
    say "the supervisor was killed (code $rc), time $kills of $recover_retries without a new checkpoint"
  done
}

# --- what follows from an exit ------------------------------------------------------------------------------

choose_action() { # from `rc`: the row of exit_policy.sh into `row`, its action into `action`
  row=$rc
  if ((rc > 128)); then row=signal; fi
  if [[ -z ${after_exit[$row]:-} ]]; then row=other; fi
  action=${after_exit[$row]}
}

may_start_again() { # else `reason` says why not
  local stop=''
  if [[ -e $cancel_intent ]]; then
    stop=cancelled
  elif ((told_to_end)); then
    if [[ $time_limit == yes ]]; then stop=time_limit; else stop=preemption; fi
  fi
  choose_action
  reason=${exit_reason[$row]}
  if [[ $action == 'done' ]]; then
    return 1
  elif ((requeued)); then
    return 0
  elif [[ -n $hook_failure ]]; then
    reason="hook $hook_failure"
  elif [[ -n $stop ]]; then
    cause=$stop reason=${stop_reason[$stop]}
    if [[ ${after_stop[$stop]} == start_again ]]; then
      reason+=', and the job could not be started again'
    else
      cancelled=true
    fi
  elif [[ $action == start_again && $recover_mode == disabled ]]; then
    reason+=', and recover.mode is disabled'
  elif [[ $action == start_again ]]; then
    return 0
  fi
  return 1
}

start_again() { # exits where Slurm starts the script later; fails, with `reason`, where nothing does
  local bad
  if [[ $scheduler == allocation ]]; then
    # Somebody asked for the stop, or the time of the surrounding job is over.
    if [[ -e $drain_intent ]]; then return 1; fi
    bad=$(blamed_nodes) || bad=''
    if [[ -n $bad ]]; then
      reason="the attempt blames $bad, and a start in the same job has the same nodes: salloc --exclude=$bad"
      return 1
    fi
  fi
  if [[ $scheduler != slurm ]]; then
    if ((restart >= max_restarts)); then
      reason="stopped $max_restarts times"
      return 1
    fi
    record requeued "\"code\": $rc"
    restart=$((restart + 1))
    drain_intent=$trial_dir/intent/drain-$job_id.$restart.json
    return 0
  fi
  if ((!requeued)) && ! ask_again "\"code\": $rc"; then
    # A cancel may have come in between, and is then the reason.
    if may_start_again; then
      reason="${exit_reason[$row]}, but Slurm took neither a requeue nor a successor"
    fi
    return 1
  fi
  say "stopped with its state saved (code $rc): requeued"
  exit "$rc"
}

blamed_nodes() { # by this attempt, as `n2,n3`
  sed -n 's/.*"event": "bad_nodes", "nodes": \[\([^]]*\)\].*/\1/p' \
    "$trial_dir/$attempts/$job_id.$restart/events.jsonl" | tail -n 1 | tr -d '" '
}

ask_again() { # MORE_FOR_THE_RECORD: Slurm starts this script from its first line, or a successor continues
  local bad next
  if [[ $scheduler != slurm ]]; then return 1; fi
  if [[ $backend == submitit ]]; then
    # submitit requeues a job whose last record is this one.
    record requeued "$1"
    return
  fi
  if ! is_newest_start; then
    say "Slurm has started this job again on other nodes: this start ends"
    exit "$rc"
  fi
  # A TERM is noted and not forwarded: the requeue itself causes one.
  trap 'told_to_end=1 interrupted=1' TERM
  # This may take long, and so comes before the last check for a cancel.
  bad=$(nodes_to_exclude) || bad=$exclude
  if is_wanted; then
    if [[ $continue_by == requeue ]]; then
      if requeue "$bad"; then
        record requeued "$1"
        return
      fi
      say "Slurm refuses to requeue job $slurm_job: a successor continues"
    fi
    # Slurm sends TERM to every process, and this shell must live to report the job id.
    if next=$(trap '' TERM; start_successor "$bad"); then
      if is_wanted; then
        record requeued "$1, \"successor\": \"$next\""
        return
      fi
      say "stopped by a signal while successor $next was submitted: it is cancelled"
      undisturbed scancel "$next" || true
    fi
  fi
  trap told TERM
  return 1
}

is_newest_start() { # waits for up to an hour while Slurm does not answer: this node may be cut off
  local answer tries
  for ((tries = 0; tries < 360 && !told_to_end; tries++)); do
    if answer=$(timeout 20 scontrol show job -o "$slurm_job"); then
      [[ $answer != *' Restarts='* || $answer == *" Restarts=${SLURM_RESTART_COUNT:-0} "* ]]
      return
    fi
    say "Slurm does not answer; it is asked again in 10 s"
    sleep 10
  done
}

is_wanted() { # not once it was cancelled, or was sent a TERM that is not the time limit's
  if ((told_to_end)) && [[ -z $time_limit ]]; then
    if out_of_time; then time_limit=yes; else time_limit=no; fi
  fi
  [[ ! -e $cancel_intent && ($told_to_end == 0 || $time_limit == yes) ]]
}

undisturbed() { # COMMAND: it must live to report its result, though Slurm sends TERM to every process here
  (
    trap '' TERM
    exec "$@"
  )
}

requeue() { # NODES_TO_EXCLUDE: under the same job id; only a pending job takes them, as its whole list
  local component components=("$slurm_job")
  undisturbed scontrol requeue "$slurm_job" || return 1
  # Without this file no node was ever bad.
  if [[ ! -e $trial_dir/jobs/$job_id.exclude ]]; then return; fi
  if [[ $layout == hetjob ]]; then components=("$SLURM_JOB_ID" "$SLURM_JOB_ID+1"); fi
  for component in "${components[@]}"; do
    if ! undisturbed scontrol update jobid="$component" ExcNodeList="$1"; then
      say "$component can't exclude $1"
    fi
  done
}

nodes_to_exclude() { # those of the configuration; and those that are bad now, if enough others are left
  local bad num_bad num_all partitions num_nodes
  printf '%s' "$exclude"
  bad=$(cat "$trial_dir/jobs/$job_id.exclude" 2>/dev/null) || return 0
  if [[ -z $bad ]]; then return 0; fi
  if [[ $layout == hetjob ]]; then
    partitions=$SLURM_JOB_PARTITION_HET_GROUP_0,$SLURM_JOB_PARTITION_HET_GROUP_1
    num_nodes=$((SLURM_JOB_NUM_NODES_HET_GROUP_0 + SLURM_JOB_NUM_NODES_HET_GROUP_1))
  else
    partitions=$SLURM_JOB_PARTITION num_nodes=$SLURM_JOB_NUM_NODES
  fi
  num_bad=$(scontrol show hostnames "${exclude:+$exclude,}$bad" | sort -u | wc -l)
  num_all=$(timeout 20 sinfo -h -N -p "$partitions" -o %N | sort -u | wc -l)
  if ((num_all - num_bad < num_nodes)); then
    say "not excluded, or too few nodes would be left: $bad"
  else
    say "excluded: $bad"
    printf '%s' "${exclude:+,}$bad"
  fi
}

start_successor() { # NODES_TO_EXCLUDE: prints the id of the job that continues
  local flags=(--name "$job_name" --script "$script_name")
  # Without this file no node was ever bad.
  if [[ -e $trial_dir/jobs/$job_id.exclude ]]; then flags=(--exclude "$1" "${flags[@]}"); fi
  if [[ $script_name == servers.sbatch ]]; then flags+=(--array "$SLURM_ARRAY_TASK_ID" "$trial_job"); fi
  undisturbed "$python" -m hpc_rl.app.submit_again successor --trial_dir "$trial_dir" --job_id "$job_id" \
    --restart $((restart + 1)) --after "$slurm_job" "${flags[@]}" </dev/null
}

# --- the first node may die ---------------------------------------------------------------------------------
# With --no-kill the job then continues without this script and without the supervisor, and no process is left
# to end it. So steps on two other nodes (or on the only other one) check once a minute whether the supervisor
# still renews its lease, and whether the first node is lost to Slurm, and then give the job back: one at once,
# the other where that has not happened. A node that was only cut off from the others may still write to the
# shared disk: so Slurm is asked at every fifth check in any case, and after two more the next start takes the
# lease away from the supervisor there. They hold no GPUs. Output: jobs/<job id>.watch.log.

watch_first_node() {
  local nodes number
  nodes=$SLURM_JOB_NODELIST
  watch_flags=(--overlap --exact --nodes=1 --ntasks=1 --cpus-per-task=1 --mem=0 --mpi=none)
  if ((knows_gpus)); then watch_flags+=(--gpus-per-node=0); fi
  if [[ $layout == hetjob ]]; then nodes=$SLURM_JOB_NODELIST_HET_GROUP_1 watch_flags+=(--het-group=1); fi
  mapfile -t others < <(scontrol show hostnames "$nodes" | grep -vxF "$SLURMD_NODENAME")
  trap 'kill "${watcher_pids[@]}" 2>/dev/null || true' EXIT
  for number in 0 1; do
    if ((number < ${#others[@]})); then
      keep_watching "$number" >>"$trial_dir/jobs/$job_id.watch.log" 2>&1 &
      watcher_pids+=("$!")
    fi
  done
}

keep_watching() { # NUMBER: on that other node; when it dies on the next but one, as two of these run
  local number=$1 end_command='scontrol requeue'
  if [[ $recover_mode == disabled || $continue_by == successor ]]; then end_command=scancel; fi
  while :; do
    srun "${watch_flags[@]}" --nodelist="${others[number % ${#others[@]}]}" --job-name="watch-$1" \
      bash -c "$(declare -f watch_from_afar is_lost); watch_from_afar \"\$@\"" watch \
      "$SLURMD_NODENAME" "$end_command" "$trial_dir/jobs/$job_id.state" "$owner_lease" $((1 + 3 * $1)) \
      </dev/null || true
    number=$((number + 2))
    sleep 60
  done
}

# shellcheck disable=SC2329 # it is sent to the other nodes as text
watch_from_afar() { # FIRST_NODE END_COMMAND STATE_FILE LEASE NUM_CHECKS
  local before now='' never num_lost=0 num_checks=0 needed
  # Nothing is ever written there: reading waits without a process of its own, which a kill could miss.
  exec {never}<> <(:)
  while :; do
    read -rt "${HPC_RL_WATCH_S:-60}" -u "$never" || true
    before=$now now=$(cat "$4".epoch-* 2>/dev/null)
    needed=$5 num_checks=$((num_checks + 1))
    if [[ $now != "$before" ]]; then
      needed=$(($5 + 2))
      if ((num_lost == 0 && num_checks % 5)); then continue; fi
    fi
    if is_lost "$1"; then num_lost=$((num_lost + 1)); else num_lost=0; fi
    if ((num_lost < needed)); then continue; fi
    printf '{"event": "first_node_lost", "time": %(%s)T, "restart": %d}\n' \
      -1 "${SLURM_RESTART_COUNT:-0}" >>"$3"
    # shellcheck disable=SC2086 # a command and its argument
    $2 "$SLURM_JOB_ID"
  done
}

# shellcheck disable=SC2329 # it is sent to the other nodes as text
is_lost() { # NODE: no longer in the job, or dead
  # Slurm 22.05 may leave a dead node in the list of a job that was requeued.
  local nodes state
  if ! nodes=$(squeue -h -j "$SLURM_JOB_ID" -o %N) || [[ -z $nodes ]]; then return 1; fi
  if ! nodes=$(scontrol show hostnames "${nodes//$'\n'/,}"); then return 1; fi
  if [[ $'\n'$nodes$'\n' != *$'\n'"$1"$'\n'* ]]; then return 0; fi
  state=$(sinfo -h -N -n "$1" -o %T)
  [[ ${state%%$'\n'*} == @(down|drained|fail|powered_down|powering_down)?([^a-z]) ]]
}

# --- hooks: scripts of the site and of the trial, each with a time limit ------------------------------------
# pre_job and post_job run here, pre_node and post_node on every node, on_preempt here when the job gets TERM.
# A pre_ hook that fails ends the job; other failures are only reported. Output: attempts/<attempt>/hooks/.

run_hooks_here() { # EVENT LIMIT_S LOG_DIR SCRIPT...: one after the other; a line "NODE CODE SCRIPT" for each
  local event=$1 limit_s=$2 logs=$3 script code pid node=${SLURMD_NODENAME:-}
  shift 3
  if [[ -z $node ]]; then read -r node </proc/sys/kernel/hostname; fi
  for script; do
    code=0
    HPC_RL_HOOK=$event HPC_RL_NODE=$node \
      timeout --kill-after=10 "$limit_s" "$script" </dev/null >>"$logs/$event.$node.log" 2>&1 &
    pid=$!
    trap 'kill "$pid" 2>/dev/null || true' TERM
    wait "$pid" || code=$?
    printf '%s %d %s\n' "$node" "$code" "${script##*/}"
    if ((code)) && [[ $event == pre_* ]]; then return 0; fi
  done
}

hook_paths() { # NAME...: into `paths`
  local name
  paths=()
  for name; do paths+=("$trial_dir/scripts/$name"); done
}

run_hooks() { # EVENT here|nodes NAME...: fails where one of them fails; `hook_failure` names it and its node
  local event=$1 where=$2 limit_s=$hook_limit_s logs=$trial_dir/$attempts/$job_id.$restart/hooks
  local answers=$logs/$event.answers num_nodes=1 num_seen=0 node code script paths
  local -A seen=()
  shift 2
  if (($# == 0)); then return 0; fi
  hook_paths "$@"
  hook_failure=''
  if ! mkdir -p "$logs" || ! : >"$answers"; then
    hook_failure="$event can't run: $logs can't be written"
    return 1
  fi
  export HPC_RL_TRIAL_DIR=$trial_dir HPC_RL_ATTEMPT=$job_id.$restart HPC_RL_CODE=$rc
  if [[ $where == nodes && $steps == srun ]]; then
    num_nodes=${SLURM_JOB_NUM_NODES:-1}
    timeout --kill-after=10 "$((limit_s * $# + 60))" \
      srun --overlap --mem=0 --nodes="$num_nodes" --ntasks="$num_nodes" \
      --ntasks-per-node=1 --cpus-per-task=1 \
      --kill-on-bad-exit=0 --export=ALL --mpi=none --job-name="$event" \
      bash -c "$(declare -f run_hooks_here); run_hooks_here \"\$@\"" hooks \
      "$event" "$limit_s" "$logs" "${paths[@]}" </dev/null >"$answers" &
  else
    run_hooks_here "$event" "$limit_s" "$logs" "${paths[@]}" >"$answers" &
  fi
  hook_pid=$!
  wait_for "$hook_pid"
  hook_pid=''
  while read -r node code script; do
    # Other lines come from a TaskProlog of the site.
    if [[ $code != +([0-9]) ]]; then continue; fi
    if [[ -z ${seen[$node]:-} ]]; then num_seen=$((num_seen + 1)); fi
    seen[$node]=1
    if ((code == 124)); then
      hook_failure+="${hook_failure:+; }$script took longer than $limit_s s on node $node"
    elif ((code)); then
      hook_failure+="${hook_failure:+; }$script ended with code $code on node $node"
    fi
  done <"$answers"
  if ((num_seen < num_nodes)); then
    hook_failure+="${hook_failure:+; }$event: answers came from $num_seen of $num_nodes nodes (${!seen[*]})"
  fi
  if [[ -z $hook_failure ]]; then return 0; fi
  say "hook: $hook_failure; see $logs"
  return 1
}

before_attempt() { # fails where the attempt must not begin
  run_hooks pre_job here "${pre_job_hooks[@]}" && run_hooks pre_node nodes "${pre_node_hooks[@]}"
}

after_attempt() { # after every attempt that began, also where it is about to start again
  # Waiting for a hook leaves the code of that hook in `rc`.
  local failure=$hook_failure code=$rc
  if [[ -n $preempt_pid ]]; then wait_for "$preempt_pid"; fi
  rc=$code
  run_hooks post_node nodes "${post_node_hooks[@]}" || true
  rc=$code
  run_hooks post_job here "${post_job_hooks[@]}" || true
  hook_failure=$failure rc=$code
}

# shellcheck disable=SC2329 # the trap calls it
on_preempt() { # once, while the supervisor saves
  local logs=$trial_dir/$attempts/$job_id.$restart/hooks paths
  if ((${#on_preempt_hooks[@]} == 0)) || [[ -n $preempt_pid || -e $cancel_intent ]]; then return 0; fi
  mkdir -p "$logs" || return 0
  hook_paths "${on_preempt_hooks[@]}"
  export HPC_RL_TRIAL_DIR=$trial_dir HPC_RL_ATTEMPT=$job_id.$restart
  run_hooks_here on_preempt "$on_preempt_limit_s" "$logs" "${paths[@]}" >>"$logs/on_preempt.answers" &
  preempt_pid=$!
}

# --- the job ------------------------------------------------------------------------------------------------

run_job() { # ARGUMENT_OF_THE_SCRIPT...: leaves its exit code in `rc`, or exits to be started again
  name_job "$@"
  raise_limits
  if [[ $steps == srun ]]; then clear_slurm_defaults; fi
  if ((n_nodes > 1)); then watch_first_node; fi
  if [[ $scheduler == slurm && $layout == jobs && $script_name == trial.sbatch ]]; then
    # Servers that gave their nodes back while this job waited are submitted again.
    ("$python" -m hpc_rl.app.submit_again servers --trial_dir "$trial_dir" --job_id "$job_id" \
      </dev/null || true) &
  fi
  trap told TERM INT HUP
  trap 'leave_drain_intent; forward USR1' USR1
  leave_submission_record
  while :; do
    record started "$(identify)"
    if before_attempt; then
      run_attempt
    elif ((told_to_end)); then
      rc=143 hook_failure=''
    else
      rc=70
    fi
    after_attempt
    if ! may_start_again || ! start_again; then break; fi
  done
  say "exits with code $rc: $reason"
  reason=${reason//\\/\\\\} reason=${reason//\"/\\\"}
  record ended \
    "\"code\": $rc, \"cancelled\": $cancelled, \"reason\": \"$reason\"${cause:+, \"cause\": \"$cause\"}"
}
