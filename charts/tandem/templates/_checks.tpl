{{/* What values.schema.json cannot say: values that do not fit together. */}}

{{- define "tandem.checks" -}}
{{- $values := .Values -}}
{{- if and $values.redis.url $values.redis.secretName -}}
{{- fail "redis.url and redis.secretName are both set: keep one" -}}
{{- end -}}
{{- include "tandem.checkModel" . -}}
{{- include "tandem.checkPorts" . -}}
{{- include "tandem.checkScaling" . -}}
{{- range $role := list "router" "prefill" "decode" -}}
{{- $drain := (get $values $role).drain -}}
{{- if gt (float64 $drain.settleSeconds) (float64 $drain.timeoutSeconds) -}}
{{- fail (printf "%s.drain.settleSeconds is %v: it must be at most %s.drain.timeoutSeconds, %v" $role $drain.settleSeconds $role $drain.timeoutSeconds) -}}
{{- end -}}
{{- $own := include "tandem.ownSettings" $ | fromYaml -}}
{{- if ne $role "router" -}}
{{- $_ := set $own "total_pages" (printf "%s.totalPages" $role) -}}
{{- end -}}
{{- range $name, $_ := (get $values $role).settings -}}
{{- if not (regexMatch "^[a-z][a-z0-9_]*$" $name) -}}
{{- fail (printf "%s.settings.%s is no name of a setting: write it as in --help with underscores, %s" $role $name (trimPrefix "--" $name | lower | replace "-" "_")) -}}
{{- end -}}
{{- if hasKey $own $name -}}
{{- $instead := get $own $name -}}
{{- fail (printf "%s.settings.%s is given by the chart itself%s" $role $name (ternary (printf ": use %s" $instead) "" (ne $instead ""))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.checkModel" -}}
{{- $model := .Values.model -}}
{{- $cache := .Values.modelCache -}}
{{- if and $cache.readOnly (not $cache.existingClaim) -}}
{{- fail "modelCache.readOnly is true and modelCache.existingClaim is empty: an empty folder that nobody may fill holds no model" -}}
{{- end -}}
{{- if and $cache.readOnly $model.pull -}}
{{- fail "model.pull is true and modelCache.readOnly is true: pulling writes, so set one of them to false" -}}
{{- end -}}
{{- if not (or $model.pull $cache.existingClaim (hasPrefix "/" $model.name)) -}}
{{- fail (printf "model.name %s would be nowhere: set model.pull, or a modelCache.existingClaim that holds it, or name an absolute path" $model.name) -}}
{{- end -}}
{{- end -}}

{{/* 64 writers at once and their successors: a decode member keeps an agent, with a port, for each prefill process. */}}
{{- define "tandem.checkPorts" -}}
{{- $range := splitList "-" .Values.transfer.portRange -}}
{{- $low := index $range 0 | int -}}
{{- $high := index $range 1 | int -}}
{{- if or (lt $low 1024) (gt $high 65535) (lt (sub (add $high 1) $low) 72) -}}
{{- fail (printf "transfer.portRange is %s: it must be low-high from 1024 to 65535 with at least 72 ports" .Values.transfer.portRange) -}}
{{- end -}}
{{- range $name, $port := dict "memberPort" .Values.memberPort "metrics.port" .Values.metrics.port -}}
{{- if and (ge (int $port) $low) (le (int $port) $high) -}}
{{- fail (printf "%s is %d, inside transfer.portRange %s: move one of them" $name (int $port) $.Values.transfer.portRange) -}}
{{- end -}}
{{- end -}}
{{- range $name, $port := dict "memberPort" .Values.memberPort "router.port" .Values.router.port -}}
{{- if and $.Values.metrics.enabled (eq (int $port) (int $.Values.metrics.port)) -}}
{{- fail (printf "%s and metrics.port are both %d: move one of them" $name (int $port)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
