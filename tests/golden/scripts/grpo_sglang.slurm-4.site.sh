# shellcheck shell=bash
# The environment of the job: the site's files hooks.d/environment, the block below, and launcher.modules, setup
# and env. Every script of the trial sources it, without -e and -u. To change it: hpc-rl templates eject site
