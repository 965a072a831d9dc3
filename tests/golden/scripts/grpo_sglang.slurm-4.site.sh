# shellcheck shell=bash
# What this cluster needs before anything else: module load, proxies, ulimit. Every script of the trial
# sources this file, without -e and -u. To change it: hpc-rl templates eject site
