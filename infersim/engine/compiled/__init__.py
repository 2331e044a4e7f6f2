"""The compiled loop. Every file of this folder is part of its machine code: a change of any compiles it anew."""
