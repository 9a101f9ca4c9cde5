// A witness that shares no code with this project: notes are read and checked by golang.org/x/mod/sumdb/note, consistency
// proofs by golang.org/x/mod/sumdb/tlog.
//
//	witness serve ADDRESS NAME SEED-HEX LOG-KEY...     cosigns (C2SP tlog-witness), after printing its key
//	witness verify LOG-KEY WITNESS-KEY < NOTE          prints the time that the witness's line in a note names
package main

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

// cosigner is a key of type 0x04 (cosignature/v1), as a verifier of Go's note package.
type cosigner struct {
	name   string
	public ed25519.PublicKey
}

func (c cosigner) Name() string { return c.name }

func (c cosigner) KeyHash() uint32 {
	digest := sha256.Sum256(append([]byte(c.name+"\n\x04"), c.public...))
	return binary.BigEndian.Uint32(digest[:4])
}

func cosigned(text []byte, at uint64) []byte {
	return append([]byte(fmt.Sprintf("cosignature/v1\ntime %d\n", at)), text...)
}

func (c cosigner) Verify(text, sig []byte) bool {
	return len(sig) == 72 && ed25519.Verify(c.public, cosigned(text, binary.BigEndian.Uint64(sig)), sig[8:])
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

type seen struct {
	size int64
	root tlog.Hash
}

type witness struct {
	mutex sync.Mutex
	name  string
	key   ed25519.PrivateKey
	logs  note.Verifiers
	last  map[string]seen
}

type refusal struct {
	status int
	size   int64
	why    string
}

func (r refusal) Error() string { return r.why }

func (w *witness) add(body []byte) (string, error) {
	parts := bytes.SplitN(body, []byte("\n\n"), 2)
	if len(parts) != 2 {
		return "", refusal{400, 0, "no note"}
	}
	lines := strings.Split(string(parts[0]), "\n")
	var old int64
	if _, err := fmt.Sscanf(lines[0], "old %d", &old); err != nil {
		return "", refusal{400, 0, "no old size"}
	}
	var proof tlog.TreeProof
	for _, line := range lines[1:] {
		hash, err := tlog.ParseHash(line)
		if err != nil {
			return "", refusal{400, 0, "no hash"}
		}
		proof = append(proof, hash)
	}
	opened, err := note.Open(parts[1], w.logs)
	if err != nil {
		return "", refusal{403, 0, err.Error()}
	}
	text := strings.Split(opened.Text, "\n")
	size, err := strconv.ParseInt(text[1], 10, 64)
	check(err)
	root, err := tlog.ParseHash(text[2])
	check(err)
	if opened.Sigs[0].Name != text[0] {
		return "", refusal{403, 0, "signed by another log"}
	}
	w.mutex.Lock()
	defer w.mutex.Unlock()
	known := w.last[text[0]]
	if old != known.size || (size == known.size && root != known.root) {
		return "", refusal{409, known.size, "conflict"}
	}
	if old > 0 {
		if err := tlog.CheckTree(proof, size, root, old, known.root); err != nil {
			return "", refusal{422, 0, err.Error()}
		}
	}
	w.last[text[0]] = seen{size, root}
	at := uint64(time.Now().Unix())
	self := cosigner{w.name, w.key.Public().(ed25519.PublicKey)}
	blob := binary.BigEndian.AppendUint32(nil, self.KeyHash())
	blob = binary.BigEndian.AppendUint64(blob, at)
	blob = append(blob, ed25519.Sign(w.key, cosigned([]byte(opened.Text), at))...)
	return fmt.Sprintf("— %s %s\n", w.name, base64.StdEncoding.EncodeToString(blob)), nil
}

func (w *witness) ServeHTTP(answer http.ResponseWriter, request *http.Request) {
	body, err := io.ReadAll(request.Body)
	check(err)
	line, err := w.add(body)
	var refused refusal
	if errors.As(err, &refused) {
		if refused.status == 409 {
			answer.Header().Set("Content-Type", "text/x.tlog.size")
			answer.WriteHeader(409)
			fmt.Fprintf(answer, "%d\n", refused.size)
			return
		}
		http.Error(answer, refused.why, refused.status)
		return
	}
	io.WriteString(answer, line)
}

func serve(address, name, seed string, keys []string) {
	raw, err := hex.DecodeString(seed)
	check(err)
	key := ed25519.NewKeyFromSeed(raw)
	var logs []note.Verifier
	for _, text := range keys {
		log, err := note.NewVerifier(text)
		check(err)
		logs = append(logs, log)
	}
	self := cosigner{name, key.Public().(ed25519.PublicKey)}
	listener, err := net.Listen("tcp", address)
	check(err)
	public := base64.StdEncoding.EncodeToString(append([]byte{4}, self.public...))
	fmt.Printf("%s+%08x+%s\n", name, self.KeyHash(), public)
	check(http.Serve(listener, &witness{name: name, key: key, logs: note.VerifierList(logs...), last: map[string]seen{}}))
}

func verify(logKey, witnessKey string) {
	log, err := note.NewVerifier(logKey)
	check(err)
	parts := strings.SplitN(witnessKey, "+", 3)
	content, err := base64.StdEncoding.DecodeString(parts[2])
	check(err)
	who := cosigner{parts[0], ed25519.PublicKey(content[1:])}
	if content[0] != 4 || fmt.Sprintf("%08x", who.KeyHash()) != parts[1] {
		check(errors.New("the key does not hold together"))
	}
	text, err := io.ReadAll(os.Stdin)
	check(err)
	opened, err := note.Open(text, note.VerifierList(log, who))
	check(err)
	if len(opened.Sigs) != 2 {
		check(fmt.Errorf("%d of two signatures hold", len(opened.Sigs)))
	}
	blob, err := base64.StdEncoding.DecodeString(opened.Sigs[1].Base64)
	check(err)
	fmt.Println(binary.BigEndian.Uint64(blob[4:12]))
}

func main() {
	if os.Args[1] == "serve" {
		serve(os.Args[2], os.Args[3], os.Args[4], os.Args[5:])
	} else {
		verify(os.Args[2], os.Args[3])
	}
}
