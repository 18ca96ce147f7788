{% for question, check in asked %}
printf '%s' {{ question }} > question.json
{{ check }} < question.json
{% endfor %}
printf {{ hostfile | replace("\n", "\\n") }} > hostfile
{% for name, value in stated %}{{ name | safe }}={{ value }} {% endfor %}{{ launch }}
curl --noproxy '*' {{ url | safe }}/health
{% set header = ' -H "Authorization: Bearer ${%s%%%%,*}"' % key if key else "" %}
curl --noproxy '*' {{ url | safe }}/v1/chat/completions{{ header | safe }} -H 'Content-Type: application/json' -d {{ chat }}
rm hostfile question.json
