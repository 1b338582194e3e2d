class Guard: pass
