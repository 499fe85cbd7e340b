{{/* The container of a pool. Arguments: root, component, pool (its name), values (the pool's), index
     (among the sidecars of a pod; their ports differ). */}}
{{- define "outrider.proposerContainer" -}}
{{- $sidecar := eq .values.placement "sidecar" -}}
{{- $port := add 7003 (ternary .index 0 $sidecar) -}}
{{- $health := add 9202 (ternary .index 0 $sidecar) -}}
{{- $metrics := add 9102 (ternary .index 0 $sidecar) -}}
{{- $remote := include "outrider.poolFetches" . -}}
name: {{ ternary (printf "proposer-%s" .pool) "proposer" $sidecar }}
image: {{ include "outrider.image" (dict "root" .root "device" .values.device) }}
{{- if $sidecar }}
# It starts the proposer again itself: a container that crashes makes its pod unready, and its scorer
# one that may be evicted.
command:
  - sh
  - -c
  - |
    trap 'ending=yes; kill -TERM "$child" 2>/dev/null' TERM
    while [ -z "$ending" ]; do
      "$0" "$@" &
      child=$!
      wait "$child"
      [ -n "$ending" ] || { sleep 10 & child=$!; wait "$child"; }
    done
    wait "$child"
  - outrider
  - proposer
{{- else }}
command: [outrider, proposer]
{{- end }}
args:
  - "--host={{ .root.Values.listenAddress }}"
  - --port={{ $port }}
  - --metrics-port={{ $metrics }}
  - --health-port={{ $health }}
  - --proposer-id=$(POD_NAME){{ if $sidecar }}-{{ .pool }}{{ end }}
  - --pool={{ .pool }}
  - --scorer={{ if $sidecar }}unix:/run/outrider/scorer.sock{{ else }}{{ include "outrider.scorers" .root }}{{ end }}
  {{- include "outrider.drafting" (dict "values" .values "target" .root.Values.model.name) | nindent 2 }}
  - --start-timeout={{ .root.Values.startSeconds }}
  - --drain-grace-seconds={{ .values.drainGraceSeconds }}
  {{- with include "outrider.tlsFlags" .root }}{{ . | trim | nindent 2 }}{{ end }}
  {{- with include "outrider.ownFlags" (dict "values" .values "threads" 1) }}{{ . | trim | nindent 2 }}{{ end }}
env:
  {{- include "outrider.podName" .root | nindent 2 }}
  {{- if and $remote $sidecar }}
  {{- with include "outrider.hubEnv" .root }}{{ . | trim | nindent 2 }}{{ end }}
  {{- end }}
  {{- with include "outrider.env" (dict "root" .root "model" (and $remote (not $sidecar)) "env" .values.env) }}{{ . | trim | nindent 2 }}{{ end }}
ports:
  - {name: {{ ternary (printf "grpc-%d" .index) "grpc" $sidecar }}, containerPort: {{ $port }}}
  - {name: {{ ternary (printf "metrics-%d" .index) "metrics" $sidecar }}, containerPort: {{ $metrics }}}
{{- if $sidecar }}
# No probes, and it downloads its model itself: a proposer must not keep its scorer from serving. One
# whose work hangs ends by itself.
lifecycle:
  preStop: # when the pod goes, its scorer finishes what it has: with drafts, until it has ended
    exec:
      command:
        - python
        - -P
        - -c
        - |
          import socket, time
          try:
              while True:
                  with socket.socket(socket.AF_UNIX) as scorer:
                      scorer.connect("/run/outrider/scorer.sock")
                  time.sleep(0.5)
          except OSError:
              pass
{{- else }}
{{ include "outrider.grpcProbes" (dict "root" .root "port" $health "service" "outrider.v1.ProposerService") }}
{{- end }}
resources:
  {{- include "outrider.resources" . | nindent 2 }}
{{ include "outrider.container" . }}
volumeMounts:
  {{- include "outrider.mounts" . | nindent 2 }}
  {{- if $sidecar }}
  - {name: run, mountPath: /run/outrider}
  {{- if $remote }}
  {{- with include "outrider.hubMount" .root }}{{ . | trim | nindent 2 }}{{ end }}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* Flags of how a pool drafts, or a scorer itself, which knows target and device. Arguments: values,
     target. */}}
{{- define "outrider.drafting" -}}
- --method={{ .values.method }}
{{- if include "outrider.weights" . }}
- --model={{ .values.model }}
{{- if and .target (include "outrider.module" .) }}
- --target-model={{ .target }}
{{- end }}
{{- with .values.dtype }}
- --dtype={{ . }}
{{- end }}
{{- with .values.device }}
- --device={{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* How the scorers draft themselves, with what a pool's values say of it; empty: not. Returns YAML. */}}
{{- define "outrider.inProcess" -}}
{{- with .Values.scorer.inProcess -}}
{{- if .method }}{{ merge (dict "model" (default "embedded" .model)) . | toYaml }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* The same as flags in one text, which the scorer splits as a shell does. */}}
{{- define "outrider.inProcessFlags" -}}
{{- with include "outrider.inProcess" . | fromYaml -}}
{{- $words := list -}}
{{- range printf "%s\n%s" (include "outrider.drafting" (dict "values" .)) (include "outrider.flags" .flags) | fromYamlArray -}}
{{- $quoted := printf "'%s'" (replace "'" "'\"'\"'" .) -}}
{{- $words = append $words (ternary . $quoted (regexMatch "^[-A-Za-z0-9_@%+=:,./]+$" .)) -}}
{{- end -}}
{{- join " " $words -}}
{{- end -}}
{{- end -}}

{{/* A pool's methods that read the target's hidden states, with commas between. Arguments: values. */}}
{{- define "outrider.module" -}}
{{- $found := list -}}
{{- range $method := splitList "," .values.method -}}
{{- if has $method (list "dspark" "dflash" "peagle" "eagle3" "mtp" "eagle" "medusa" "mlp_speculator") }}{{ $found = append $found $method }}{{ end -}}
{{- end -}}
{{- join "," $found -}}
{{- end -}}

{{/* What they read of these states, for --hidden-features: eagle3 or final, or nothing where only the
     module's config.json tells. Arguments: values. */}}
{{- define "outrider.states" -}}
{{- with include "outrider.module" . }}{{ if not (has . (list "dspark" "dflash")) }}{{ ternary "eagle3" "final" (has . (list "eagle3" "peagle")) }}{{ end }}{{ end -}}
{{- end -}}

{{/* A pool's methods that have weights, likewise: --model can name those of one. */}}
{{- define "outrider.weights" -}}
{{- $found := ternary (list "draft_model") list (has "draft_model" (splitList "," .values.method)) -}}
{{- with include "outrider.module" . }}{{ $found = append $found . }}{{ end -}}
{{- join "," $found -}}
{{- end -}}

{{/* Whether a pool has to download: its model, or of the target what a module shares with it.
     Arguments: root, values. */}}
{{- define "outrider.poolFetches" -}}
{{- $names := ternary (list .values.model) list (not (empty (include "outrider.weights" .))) -}}
{{- if include "outrider.module" . }}{{ $names = append $names .root.Values.model.name }}{{ end -}}
{{- range $names }}{{ include "outrider.isRemote" . }}{{ end -}}
{{- end -}}
