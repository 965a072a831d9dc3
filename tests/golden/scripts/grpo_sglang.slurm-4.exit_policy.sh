# shellcheck shell=bash
# What the job script does once its supervisor has exited. A stop that the script knows of comes first (not if
# the code is 0), then the exit code: `signal` is any above 128, `other` all the rest. Reasons go on record.
# Actions: done; start_again (requeue or a successor); restart_supervisor (in place, within recover.retries); end.
# shellcheck disable=SC1010,SC2034 # job_policy.sh reads them, and `done` is a word here
declare -A after_stop stop_reason after_exit exit_reason

after_stop[cancelled]=end stop_reason[cancelled]='cancelled by the user'
after_stop[time_limit]=start_again stop_reason[time_limit]='the time limit was reached'
after_stop[preemption]=end stop_reason[preemption]='stopped by a signal'

after_exit[0]=done exit_reason[0]=done
after_exit[75]=start_again exit_reason[75]='stopped with its state saved'
after_exit[signal]=restart_supervisor exit_reason[signal]='the supervisor was killed more often in a row without a new checkpoint than recover.retries allows'
after_exit[other]=end exit_reason[other]='the supervisor gave up; see events.jsonl of the attempt'
