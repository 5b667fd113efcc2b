// Loaded before Azurite: it ends with whoever started it, even if that one was killed. Its standard input is a pipe
// that nobody writes to and that closes then.
process.stdin.on("end", () => process.exit(0));
process.stdin.on("error", () => process.exit(0));
process.stdin.resume();
process.stdin.unref?.();
