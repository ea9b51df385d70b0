"""The rig: what the scripted gate and the script's ``t`` are both built on."""
