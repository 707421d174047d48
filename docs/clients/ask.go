// Ask a running edgeqwen daemon from Go (1.19 or later): one file, the standard library.
//
//	go run ask.go SOCKET PROMPT [SESSION]
//
// The answer goes to stdout as it comes, the thought before it to stderr.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"time"
)

const (
	maxPathBytes = 107      // sun_path without the final NUL
	maxLineBytes = 64 << 10 // streamed frames have at most 32 KiB; an answer in one piece has up to 256 KiB
	// After our end of input the daemon sends an empty line every 250 ms until it answers.
	silence = 30 * time.Second
)

// Frame has what this example uses; Final is the last one as it came, with usage, session and the rest.
type Frame struct {
	ID        json.RawMessage `json:"id"`
	Done      *bool           `json:"done"`
	Delta     string          `json:"delta"`
	Reasoning string          `json:"reasoning"`
	Finish    string          `json:"finish"`
	Error     *Error          `json:"error"`
	Raw       json.RawMessage `json:"-"`
}

// Error is what the daemon answered, or no_daemon, cut_off, bad_path.
type Error struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Field   string `json:"field"`
	RetryMs int    `json:"retry_ms"`
}

func (e *Error) Error() string { return fmt.Sprintf("%s (%s)", e.Message, e.Code) }

// ExitCode is what a program may end with.
func (e *Error) ExitCode() int {
	switch e.Code {
	case "bad_request", "unknown_op", "unsupported_version", "duplicate_id":
		return 64
	case "bad_json", "bad_utf8", "too_large", "timeout", "too_long":
		return 65
	case "not_found", "no_daemon":
		return 69
	case "slow_reader", "cut_off":
		return 74
	case "conflict", "session_busy", "busy", "quota", "loading", "draining":
		return 75
	case "forbidden":
		return 77
	case "bad_config", "bad_path":
		return 78
	}
	return 70 // engine, and codes that there may be one day
}

// Ask sends a request and gives its frames to each, up to the final one, which it returns. An error of each hangs up.
func Ask(path string, request map[string]any, each func(*Frame) error) (*Frame, error) {
	conn, err := connect(path)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	line, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	// A daemon that turns a connection away closes it at once: writing fails then, and its reason can still be read.
	_ = conn.SetWriteDeadline(time.Now().Add(silence))
	_, _ = conn.Write(append(line, '\n'))
	_ = conn.CloseWrite()
	scanner := bufio.NewScanner(conn)
	scanner.Buffer(make([]byte, 0, maxLineBytes), maxLineBytes)
	for conn.SetReadDeadline(time.Now().Add(silence)) == nil && scanner.Scan() {
		frame, err := parse(scanner.Bytes())
		if err != nil {
			return nil, err
		}
		if frame == nil || frame.ID != nil { // blank, or the answer to something else
			continue
		}
		if *frame.Done && frame.Error != nil {
			return frame, frame.Error
		}
		if err := each(frame); err != nil {
			return frame, err
		}
		if *frame.Done {
			return frame, nil
		}
	}
	if errors.Is(scanner.Err(), bufio.ErrTooLong) {
		return nil, notAFrame
	}
	return nil, &Error{Code: "cut_off", Message: "the connection ended before the answer did"}
}

var notAFrame = &Error{Code: "cut_off", Message: "the daemon sent something that is not a frame"}

func connect(path string) (*net.UnixConn, error) {
	if len(path) > maxPathBytes {
		return nil, &Error{Code: "bad_path", Message: path + ": the limit of a socket path is 107 bytes; shorten it"}
	}
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if errors.Is(err, os.ErrPermission) {
		return nil, &Error{Code: "forbidden", Message: path + ": this user may not connect to the daemon"}
	}
	if err != nil {
		return nil, &Error{Code: "no_daemon", Message: path + ": no daemon; start one with: edgeqwen serve"}
	}
	return conn, nil
}

// The frame in a line, nil if that is blank.
func parse(line []byte) (*Frame, error) {
	line = bytes.TrimSpace(line)
	if len(line) == 0 {
		return nil, nil
	}
	frame := &Frame{Raw: append(json.RawMessage(nil), line...)}
	if err := json.Unmarshal(line, frame); err != nil || frame.Done == nil {
		return nil, notAFrame
	}
	return frame, nil
}

func main() {
	if len(os.Args) < 3 || len(os.Args) > 4 {
		fmt.Fprintln(os.Stderr, "usage: ask SOCKET PROMPT [SESSION]")
		os.Exit(64)
	}
	request := map[string]any{"op": "chat", "prompt": os.Args[2], "stream": true}
	if len(os.Args) == 4 {
		request["session"] = "@" + os.Args[3]
	}
	_, err := Ask(os.Args[1], request, func(frame *Frame) error {
		fmt.Fprint(os.Stderr, frame.Reasoning)
		_, err := fmt.Print(frame.Delta)
		return err
	})
	var failure *Error
	switch {
	case errors.As(err, &failure):
		fmt.Fprintln(os.Stderr, "edgeqwen:", failure)
		os.Exit(failure.ExitCode())
	case err != nil: // nobody reads the answer
		os.Exit(74)
	}
}
