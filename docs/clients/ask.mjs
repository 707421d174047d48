// Ask a running edgeqwen daemon from Node (18 or later), without dependencies; copy this file.
//
//   import { ask } from './ask.mjs'
//   const final = await ask('/run/edgeqwen/edgeqwen.sock', { prompt: 'Why?', max_tokens: 64 },
//                           { onText: (text) => process.stdout.write(text) })
//
// From a shell: node ask.mjs SOCKET PROMPT [SESSION]
import net from 'node:net'
import { realpathSync } from 'node:fs'
import { fileURLToPath } from 'node:url'

const MAX_PATH_BYTES = 107
const MAX_FRAME_CHARS = 1 << 20 // an answer in one piece; streamed frames have at most 32 KiB
// After our end of input the daemon sends an empty line every 250 ms until it answers, so this much silence is its end.
const SILENCE_MS = 30_000

const EXIT_CODES = new Map(Object.entries({
  64: ['bad_request', 'unknown_op', 'unsupported_version', 'duplicate_id'],
  65: ['bad_json', 'bad_utf8', 'too_large', 'timeout', 'too_long'],
  69: ['not_found', 'no_daemon'],
  74: ['slow_reader', 'cut_off', 'silent'],
  75: ['conflict', 'session_busy', 'busy', 'quota', 'loading', 'draining'],
  77: ['forbidden'],
  78: ['bad_config', 'bad_path'],
  130: ['stopped'],
}).flatMap(([exitCode, codes]) => codes.map((code) => [code, Number(exitCode)])))

/** What the daemon answered, or no_daemon, cut_off, silent, bad_path, stopped. `exitCode` is for programs. */
export class EdgeqwenError extends Error {
  constructor({ code, message, field, retry_ms: retryMs }) {
    super(message ?? code)
    this.name = 'EdgeqwenError'
    this.code = code
    this.field = field
    this.retryMs = retryMs
    this.exitCode = EXIT_CODES.get(code) ?? 70 // engine, and codes that there may be one day
  }
}

/**
 * A streamed chat; the promise gives its final frame or fails with an EdgeqwenError. `members` are those of the request:
 * prompt or messages, session, think, tools and so on. Aborting `signal` hangs up, and so does a callback that throws.
 */
export async function ask(path, members, { onText, onReasoning, signal, timeoutMs } = {}) {
  for await (const frame of frames(path, { op: 'chat', stream: true, ...members }, { signal, timeoutMs })) {
    if (frame.reasoning) onReasoning?.(frame.reasoning)
    if (frame.delta) onText?.(frame.delta)
    if (frame.done) return frame
  }
}

/** The frames of any one request as they come, the final one included. */
export async function * frames(path, request, { signal, timeoutMs = SILENCE_MS } = {}) {
  if (Buffer.byteLength(path) > MAX_PATH_BYTES) {
    throw new EdgeqwenError({ code: 'bad_path', message: `${path}: the limit of a socket path is 107 bytes; shorten it` })
  }
  const lines = []
  let tail = ''
  let isConnected = false
  let isOver = false
  let failure
  let wake = () => {}
  const end = (error) => {
    failure ??= error
    isOver = true
    wake()
  }
  // allowHalfOpen: our end of input must not be theirs, nor theirs ours.
  const socket = net.createConnection({ path, allowHalfOpen: true, signal })
  socket.setTimeout(timeoutMs, () => socket.destroy(Object.assign(new Error(), { code: 'ETIMEDOUT' })))
  socket.setEncoding('utf8') // holds a character back until it is whole
  socket.on('data', (chunk) => {
    const parts = (tail + chunk).split('\n')
    tail = parts.pop()
    lines.push(...parts)
    if (tail.length > MAX_FRAME_CHARS) socket.destroy(notAFrame())
    wake()
  })
  socket.once('error', end).once('end', end).once('close', () => end())
  socket.once('connect', () => {
    isConnected = true
    // A daemon that turns a connection away says why and closes it at once. Node drops what it has not read when a
    // write fails, so it reads once before.
    setImmediate(() => setImmediate(() => socket.end(JSON.stringify(request) + '\n')))
  })
  try {
    while (lines.length > 0 || !isOver) {
      const line = lines.shift()
      if (line === undefined) {
        await new Promise((resolve) => { wake = resolve })
        continue
      }
      const frame = parse(line)
      if (frame === null || (frame.id !== undefined && frame.id !== request.id)) continue
      if (frame.done && frame.error) throw new EdgeqwenError(frame.error)
      yield frame
      if (frame.done) return
    }
    if (failure !== undefined) throw failure instanceof EdgeqwenError ? failure : ofSocket(failure, path, isConnected)
    throw new EdgeqwenError({ code: 'cut_off', message: 'the connection ended before the answer did' })
  } finally {
    socket.destroy()
  }
}

function parse(line) {
  if (line.trim() === '') return null
  try {
    const frame = JSON.parse(line)
    if (typeof frame?.done === 'boolean') return frame
  } catch {}
  throw notAFrame()
}

function notAFrame() {
  return new EdgeqwenError({ code: 'cut_off', message: 'the daemon sent something that is not a frame' })
}

function ofSocket(error, path, isConnected) {
  if (error.name === 'AbortError') return new EdgeqwenError({ code: 'stopped', message: 'stopped' })
  if (error.code === 'ETIMEDOUT') {
    return new EdgeqwenError({ code: 'silent', message: 'the daemon has been silent for too long' })
  }
  if (isConnected) return new EdgeqwenError({ code: 'cut_off', message: 'the connection ended before the answer did' })
  if (error.code === 'EACCES') {
    return new EdgeqwenError({ code: 'forbidden', message: `${path}: this user may not connect to the daemon` })
  }
  return new EdgeqwenError({ code: 'no_daemon', message: `${path}: no daemon; start one with: edgeqwen serve` })
}

async function main([path, prompt, session, ...more]) {
  if (prompt === undefined || more.length > 0) {
    console.error('usage: node ask.mjs SOCKET PROMPT [SESSION]')
    return 64
  }
  const stopping = new AbortController()
  process.stdout.on('error', () => stopping.abort()) // nobody reads: hang up, and the daemon stops
  const members = session === undefined ? { prompt } : { prompt, session: `@${session}` }
  try {
    await ask(path, members, {
      onText: (text) => process.stdout.write(text),
      onReasoning: (text) => process.stderr.write(text),
      signal: stopping.signal,
    })
    return 0
  } catch (error) {
    if (!(error instanceof EdgeqwenError)) throw error
    console.error(`edgeqwen: ${error.message} (${error.code})`)
    return error.exitCode
  }
}

if (process.argv[1] !== undefined && realpathSync(process.argv[1]) === fileURLToPath(import.meta.url)) {
  process.exitCode = await main(process.argv.slice(2)) // not exit(): what was written is still on its way to a pipe
}
